"""Hardware is recognised, and limits on it are respected."""

from __future__ import annotations

import platform

import psutil
import pytest

from mesh import target
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
        ({}, "sm90-nvidia-h100-80gb-hbm3-80g-cuda12"),
        (
            {"mig_profile": "3g.40gb", "memory_bytes": 42 << 30},
            "sm90-nvidia-h100-80gb-hbm3-mig-3g.40gb-42g-cuda12",
        ),
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
