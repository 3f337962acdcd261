"""The table of known GPUs hangs together."""

from __future__ import annotations

import pytest

from mesh.gpus import EIGHTHS, GPUS, find_gpu, named_gpu, plain_profile, slice_name, target_names
from mesh.precisions import PRECISIONS, parse_capability, supported_precisions

ASKED_FOR = {
    *("a10", "a100-pcie-40gb", "a100-sxm-40gb", "a100-pcie-80gb", "a100-sxm-80gb", "l4", "l40s"),
    *("h100-pcie-80gb", "h100-sxm-80gb", "h200", "b200", "rtx-4090"),
}
CUT = [gpu for gpu in GPUS.values() if gpu.mig_profiles]
GPUS_AND_SLICES = [(gpu, profile) for gpu in CUT for profile in gpu.mig_profiles]


def test_gpus_in_use_are_known():
    assert set(GPUS) >= ASKED_FOR
    assert {gpu.key.partition("-")[0] for gpu in CUT} == {"a100", "h100", "h200", "b200"}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.key)
def test_gpu_is_found_by_its_names(gpu):
    assert find_gpu(gpu.nvml_name) is gpu
    assert find_gpu(gpu.nvml_name.removeprefix("NVIDIA ")) is gpu
    assert named_gpu(gpu.key) == (gpu, None)


def test_other_variants_are_not_taken_for_known_ones():
    for name in (
        "NVIDIA A10G",
        "NVIDIA H100",
        "NVIDIA H200 NVL",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "",
    ):
        assert find_gpu(name) is None


@pytest.mark.parametrize(("gpu", "profile"), GPUS_AND_SLICES, ids=lambda part: getattr(part, "name", part))
def test_slices_are_parts_of_their_gpu(gpu, profile):
    assert profile.memory_bytes <= gpu.memory_bytes
    # What its name says of its memory holds within a tenth: the rest is the driver's.
    nominal = int(profile.name.partition(".")[2].removesuffix("gb")) * 10**9
    assert 0.9 < profile.memory_bytes / nominal < 1.1
    # Slices whose size is only known by name are reckoned too small rather than too large.
    assert abs(profile.memory_bytes / gpu.memory_bytes - profile.memory_slices / EIGHTHS) < 0.07
    assert profile.instances * profile.multiprocessors <= gpu.multiprocessors
    assert profile.instances * profile.memory_slices <= EIGHTHS
    assert named_gpu(slice_name(gpu.key, profile.name)) == (gpu, profile)


def test_names_are_all_different_and_known():
    names = target_names()

    assert len(set(names)) == len(names) == len(GPUS) + len(GPUS_AND_SLICES)
    assert all(named_gpu(name) for name in names)


@pytest.mark.parametrize(
    ("text", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.5gb"),
        ("NVIDIA H200 MIG 1g.18gb+me", "1g.18gb"),
        ("MIG 4g.96gb+gfx", "4g.96gb"),
        ("MIG 1c.3g.40gb", "1c.3g.40gb"),
        ("NVIDIA H100 80GB HBM3", ""),
    ],
)
def test_profile_is_read_without_its_engines_for_media(text, profile):
    assert plain_profile(text) == profile


@pytest.mark.parametrize(
    ("key", "able", "unable"),
    [
        ("a100-sxm-80gb", {"fp16", "bf16", "int8_sq", "int4_awq"}, {"fp8", "w4a8_awq", "nvfp4"}),
        ("a10", {"bf16"}, {"fp8", "nvfp4"}),
        ("l4", {"bf16", "fp8", "w4a8_awq"}, {"nvfp4"}),
        ("rtx-4090", {"fp8"}, {"nvfp4"}),
        ("h200", {"fp8"}, {"nvfp4"}),
        ("b200", {"fp8", "nvfp4"}, set()),
    ],
)
def test_precisions_follow_from_the_compute_capability(key, able, unable):
    found = set(GPUS[key].precisions)

    assert able <= found
    assert not unable & found


def test_capabilities_compare_as_numbers():
    assert parse_capability("10.0") > parse_capability("9.0") > parse_capability("8.9")
    assert "bf16" not in supported_precisions("7.5")
    assert "fp16" in supported_precisions("7.5")
    assert set(supported_precisions("12.0")) == set(PRECISIONS)
