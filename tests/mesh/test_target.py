"""Hardware is recognised, and limits on it are respected."""

from __future__ import annotations

import platform

import psutil
import pytest

from mesh import target
from mesh.gpus import target_names
from mesh.target import Target, detect_cpu

VARIABLES = ("OV_CPU_MAX_ISA", "ONEDNN_MAX_CPU_ISA")
H100 = Target(
    device_type="gpu",
    device_name="NVIDIA H100 80GB HBM3",
    compute_capability="9.0",
    memory_bytes=85_520_809_984,
    cuda_major=12,
    multiprocessors=132,
)


@pytest.fixture
def machine(monkeypatch):
    """Makes this host look like another one."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def look_like(name: str, cpuinfo: str = "", **environment: str) -> None:
        monkeypatch.setattr(platform, "machine", lambda: name)
        monkeypatch.setattr(platform, "processor", lambda: "")
        monkeypatch.setattr(target, "_cpuinfo", lambda: cpuinfo)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)

    return look_like


def cpuinfo(*flags: str, name: str = "AMD EPYC 9554") -> str:
    core = f"processor\t: 0\nmodel name\t: {name}\nflags\t\t: fpu sse4_1 {' '.join(flags)}\nbugs\t\t:\n\n"
    return core * 2


AVX512 = cpuinfo("avx2", "avx512f", "avx512_bf16")
AMX = cpuinfo("avx2", "avx512f", "amx_tile")


def test_this_host_is_detected():
    found = detect_cpu()

    assert found.device_type == "cpu"
    assert found.device_name
    assert found.architecture in {"x86_64", "aarch64"}
    assert found.instruction_set in target.INSTRUCTION_SET_ORDER
    assert found.memory_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("flags", "instruction_set"),
    [
        ([], "baseline"),
        (["avx"], "baseline"),
        (["avx2"], "avx2"),
        (["avx2", "avx512f"], "avx512"),
        (["avx2", "avx512f", "amx_tile"], "amx"),
        (["xavx2"], "baseline"),
    ],
)
def test_widest_instruction_set_is_found(machine, flags, instruction_set):
    machine("x86_64", cpuinfo(*flags))
    found = detect_cpu()

    assert (found.instruction_set, found.device_name) == (instruction_set, "AMD EPYC 9554")


@pytest.mark.parametrize("name", ["AMD64", "x86_64"])
def test_names_of_one_architecture_are_one(machine, name):
    machine(name, AVX512)

    assert detect_cpu().key == "cpu-x86_64-avx512"


@pytest.mark.parametrize("name", ["aarch64", "arm64"])
def test_arm_is_neon(machine, name):
    machine(name, "processor\t: 0\nFeatures\t: fp asimd\n", OV_CPU_MAX_ISA="AVX2")
    found = detect_cpu()

    assert (found.key, found.device_name) == ("cpu-aarch64-neon", name)


@pytest.mark.parametrize("text", ["", "processor\t: 0\nisa\t: rv64imafdc\n"])
def test_host_that_tells_nothing_is_baseline(machine, text):
    machine("x86_64", text)
    found = detect_cpu()

    assert (found.instruction_set, found.device_name) == ("baseline", "x86_64")


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("limit", "instruction_set"),
    [
        ("SSE41", "baseline"),
        ("AVX", "baseline"),
        ("AVX2", "avx2"),
        ("avx2", "avx2"),
        ("AVX2_VNNI_2", "avx2"),
        ("AVX512_CORE", "avx512"),
        ("AVX512_CORE_FP16", "avx512"),
        ("AVX512_CORE_AMX", "amx"),
        ("AVX512_CORE_AMX_FP16", "amx"),
        ("ALL", "amx"),
        ("DEFAULT", "amx"),
        ("", "amx"),
    ],
)
def test_limit_of_openvino_narrows_the_instruction_set(machine, variable, limit, instruction_set):
    machine("x86_64", AMX, **{variable: limit})

    assert detect_cpu().instruction_set == instruction_set


@pytest.mark.parametrize("limits", [("AVX2", "AVX512_CORE"), ("AVX512_CORE", "AVX2"), ("ALL", "AVX2")])
def test_narrower_of_two_limits_counts(machine, limits):
    machine("x86_64", AMX, **dict(zip(VARIABLES, limits, strict=True)))

    assert detect_cpu().instruction_set == "avx2"


def test_limit_does_not_widen(machine):
    machine("x86_64", cpuinfo("avx2"), OV_CPU_MAX_ISA="AVX512_CORE")

    assert detect_cpu().instruction_set == "avx2"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({}, "sm90-h100-sxm-80gb-cuda12"),
        ({"memory_bytes": 81_000_000_000}, "sm90-h100-sxm-80gb-cuda12"),
        ({"device_name": "H100 80GB HBM3"}, "sm90-h100-sxm-80gb-cuda12"),
        ({"mig_profile": "3g.40gb"}, "sm90-h100-sxm-80gb-mig-3g.40gb-cuda12"),
        ({"mig_profile": "1c.3g.40gb"}, "sm90-h100-sxm-80gb-mig-1c.3g.40gb-cuda12"),
        ({"device_name": "NVIDIA H100X", "mig_profile": "1g.9gb"}, "sm90-nvidia-h100x-80g-mig-1g.9gb-cuda12"),
        ({"device_name": "Odd {name}: x/y*", "compute_capability": "12.0"}, "sm120-odd-name-x-y-80g-cuda12"),
    ],
)
def test_key_of_a_gpu_names_what_engines_depend_on(change, key):
    assert H100.model_copy(update=change).key == key


@pytest.mark.parametrize("found", [H100, detect_cpu()])
def test_target_survives_its_message(found):
    message = found.to_proto()

    assert message.key == found.key
    assert Target.from_proto(message) == found


@pytest.mark.parametrize("name", [*target_names(), "cpu-x86_64-avx512", "cpu-aarch64-neon"])
def test_named_target_has_its_name(name):
    named = Target.from_name(name)

    assert named.name == name
    assert Target.from_proto(named.to_proto()) == named


def test_named_gpu_is_the_one_that_nvml_finds():
    assert Target.from_name("h100-sxm-80gb", cuda_major=12).key == H100.key
    assert H100.name == "h100-sxm-80gb"


def test_named_cpu_is_the_one_that_is_detected():
    found = detect_cpu()

    assert Target.from_name(found.name).key == found.key


def test_targets_have_keys_of_their_own():
    keys = [Target.from_name(name).key for name in target_names()]

    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("h100", "no target is named 'h100'; there are a10, .*h100-sxm-80gb"),
        ("l4:mig-1g.5gb", "no target is named 'l4:mig-1g.5gb'"),
        ("h200:mig-1g.10gb", "h200 has no such slice; there are h200:mig-1g.18gb, h200:mig-1g.35gb"),
        ("h200:mig-", "h200 has no such slice"),
        ("h200:1g.18gb", "h200 has no such slice"),
        ("cpu-x86_64-avx99", "cpu-<x86_64 or aarch64>-<baseline, neon, avx2, avx512, amx>"),
        ("", "no target is named ''"),
    ],
)
def test_unknown_name_is_refused_with_the_known_ones(name, problem):
    with pytest.raises(ValueError, match=problem):
        Target.from_name(name)
