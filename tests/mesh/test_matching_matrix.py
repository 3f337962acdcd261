"""Every engine of every known GPU and MIG profile, and of every CPU, offered to every other."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest

from mesh.gpus import named_gpu, target_names
from mesh.matching import match
from mesh.target import INSTRUCTION_SET_ORDER, Target
from tests import engines

CPU_NAMES = [
    *(f"cpu-x86_64-{isa}" for isa in INSTRUCTION_SET_ORDER if isa != "neon"),
    *("cpu-aarch64-neon", "cpu-aarch64-baseline"),
]
NAMES = [*target_names(), *CPU_NAMES]
PAIRS = list(itertools.product(NAMES, NAMES))


@cache
def manifest(name: str):
    return engines.manifest(target=Target.from_name(name))


def verdict(built: str, found: str, policy: str) -> str:
    return str(match(manifest(built), Target.from_name(found), {}, policy))


def expected(built: str, found: str, policy: str) -> str:
    """Match or the reason, told from the names and the table alone."""
    kinds = ["cpu" if name.startswith("cpu-") else "gpu" for name in (built, found)]
    if kinds[0] != kinds[1]:
        return f"device type: engine expects {kinds[0]}, found {kinds[1]}"
    reasons = between_cpus(built, found, policy) if kinds[0] == "cpu" else between_gpus(built, found, policy)
    return (
        "; ".join(f"{what}: engine expects {want}, found {have}" for what, want, have in reasons) or "match"
    )


def between_gpus(built: str, found: str, policy: str):
    (gpu, profile), (other, slice_found) = named_gpu(built), named_gpu(found)
    if gpu.compute_capability != other.compute_capability:
        yield "compute capability", gpu.compute_capability, other.compute_capability
    if policy != "exact":
        return
    if gpu.key != other.key:
        yield "device name", gpu.nvml_name, other.nvml_name
        memory = [
            f"{round((part or whole).memory_bytes / 2**30)} GiB"
            for whole, part in (named_gpu(built), named_gpu(found))
        ]
        if memory[0] != memory[1]:
            yield "memory", *memory
    names = [part.name if part else "none" for part in (profile, slice_found)]
    if names[0] != names[1]:
        yield "mig profile", *names


def between_cpus(built: str, found: str, policy: str):
    (_, architecture, isa), (_, other, isa_found) = built.split("-"), found.split("-")
    if architecture != other:
        yield "architecture", architecture, other
    is_wider = INSTRUCTION_SET_ORDER.index(isa_found) > INSTRUCTION_SET_ORDER.index(isa)
    if isa != isa_found and not (policy == "compatible" and is_wider):
        yield "instruction set", isa, isa_found


@pytest.mark.parametrize("policy", ["exact", "same_compute_capability", "compatible"])
def test_every_pair_matches_or_says_why_not(policy):
    wrong = [
        (built, found, verdict(built, found, policy), expected(built, found, policy))
        for built, found in PAIRS
        if verdict(built, found, policy) != expected(built, found, policy)
    ]

    assert len(PAIRS) > 4000
    assert wrong == []


def test_exact_matches_are_the_diagonal():
    assert [pair for pair in PAIRS if verdict(*pair, "exact") == "match"] == [(name, name) for name in NAMES]


def test_exact_matches_are_equal_keys():
    keys = {name: Target.from_name(name).key for name in NAMES}

    assert all((verdict(a, b, "exact") == "match") == (keys[a] == keys[b]) for a, b in PAIRS)


def test_lesser_policies_match_within_a_compute_capability_only():
    sizes = Counter(named_gpu(name)[0].compute_capability for name in target_names())
    matches = Counter(
        named_gpu(built)[0].compute_capability
        for built, found in itertools.product(target_names(), repeat=2)
        if verdict(built, found, "same_compute_capability") == "match"
    )

    assert matches == {capability: count**2 for capability, count in sizes.items()}
    assert set(matches) == {"8.0", "8.6", "8.9", "9.0", "10.0"}


@pytest.mark.parametrize(
    ("built", "found", "policy", "said"),
    [
        # Field case 30: these were met in the wild.
        ("a100-sxm-80gb", "a10", "compatible", "compute capability: engine expects 8.0, found 8.6"),
        ("h100-sxm-80gb", "l40s", "compatible", "compute capability: engine expects 9.0, found 8.9"),
        (
            "h200:mig-1g.18gb",
            "h200:mig-3g.71gb",
            "exact",
            "mig profile: engine expects 1g.18gb, found 3g.71gb",
        ),
        ("h200", "h200:mig-7g.141gb", "exact", "mig profile: engine expects none, found 7g.141gb"),
        (
            "a100-pcie-80gb",
            "a100-sxm-80gb",
            "exact",
            "device name: engine expects NVIDIA A100 80GB PCIe, found NVIDIA A100-SXM4-80GB",
        ),
        ("a100-pcie-80gb", "a100-sxm-80gb", "same_compute_capability", "match"),
        ("l4", "rtx-4090", "same_compute_capability", "match"),
        ("b200", "cpu-x86_64-avx512", "compatible", "device type: engine expects gpu, found cpu"),
        ("cpu-x86_64-avx2", "cpu-x86_64-amx", "compatible", "match"),
    ],
)
def test_reason_of_one_pair(built, found, policy, said):
    assert verdict(built, found, policy) == said
