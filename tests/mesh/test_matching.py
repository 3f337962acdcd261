"""An engine is offered only to devices that it fits, and the refusal says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import PreconditionError
from mesh.matching import match, require_match
from mesh.target import INSTRUCTION_SET_ORDER, Target
from tests import engines

GIB = 1 << 30
A100 = Target(
    device_type="gpu",
    device_name="NVIDIA A100-SXM4-80GB",
    compute_capability="8.0",
    memory_bytes=80 * GIB,
    cuda_major=12,
    multiprocessors=108,
)
A10 = A100.model_copy(
    update={"device_name": "NVIDIA A10", "compute_capability": "8.6", "memory_bytes": 24 * GIB}
)
H100 = A100.model_copy(update={"device_name": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0"})
L40S = A100.model_copy(update={"device_name": "NVIDIA L40S", "compute_capability": "8.9"})
CPU = Target(device_type="cpu", device_name="EPYC", architecture="x86_64", instruction_set="avx512")
POLICIES = ["exact", "same_compute_capability", "compatible"]


def changed(target: Target, **fields) -> Target:
    return target.model_copy(update=fields)


def verdict(expected: Target, actual: Target, policy: str = "exact"):
    return match(engines.manifest(target=expected), actual, {}, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("target", [A100, CPU])
def test_same_device_matches(target, policy):
    found = verdict(target, target, policy)

    assert found
    assert str(found) == "match"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("built", "found"), [(A100, A10), (H100, L40S), (L40S, H100)], ids=lambda target: target.device_name
)
def test_other_compute_capability_never_matches(built, found, policy):
    # Field case 30.
    reasons = verdict(built, found, policy).reasons

    capabilities = [(each.expected, each.actual) for each in reasons if each.what == "compute capability"]
    assert capabilities == [(built.compute_capability, found.compute_capability)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("built", "found"), [(A100, CPU), (CPU, A100)])
def test_other_device_type_never_matches(built, found, policy):
    assert str(verdict(built, found, policy)) == (
        f"device type: engine expects {built.device_type}, found {found.device_type}"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_other_cuda_major_never_matches(policy):
    found = verdict(A100, changed(A100, cuda_major=13), policy)

    assert str(found) == "cuda major: engine expects 12, found 13"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_name": "NVIDIA A100-PCIE-80GB"}, "device name"),
        ({"mig_profile": "3g.40gb"}, "mig profile: engine expects none, found 3g.40gb"),
    ],
)
def test_product_and_slice_matter_to_exact_only(change, reason):
    found = verdict(A100, changed(A100, **change))

    assert [str(each) for each in found.reasons] == [str(found)]
    assert str(found).startswith(reason)
    assert verdict(A100, changed(A100, **change), "same_compute_capability")


def test_memory_of_a_known_product_does_not_matter():
    # It varies with the driver and with ECC; variants with other memory are products of their own.
    assert verdict(A100, changed(A100, memory_bytes=79 * GIB))


def test_memory_tells_unknown_products_apart():
    unknown = changed(A100, device_name="NVIDIA A999")
    found = verdict(unknown, changed(unknown, memory_bytes=40 * GIB))

    assert str(found) == "memory: engine expects 80 GiB, found 40 GiB"
    assert verdict(unknown, changed(unknown, memory_bytes=80 * GIB - (300 << 20)))


@pytest.mark.parametrize("policy", POLICIES)
def test_other_architecture_never_matches(policy):
    arm = changed(CPU, architecture="aarch64", instruction_set="neon")

    assert str(verdict(CPU, arm, policy)).startswith("architecture: engine expects x86_64, found aarch64")


@pytest.mark.parametrize(
    ("built", "found", "policy", "is_match"),
    [
        ("avx2", "avx512", "exact", False),
        ("avx2", "avx512", "same_compute_capability", False),
        ("avx2", "avx512", "compatible", True),
        ("baseline", "amx", "compatible", True),
        ("avx512", "avx2", "compatible", False),
        ("avx512", "avx2", "exact", False),
    ],
)
def test_wider_instruction_set_is_compatible_only(built, found, policy, is_match):
    result = verdict(changed(CPU, instruction_set=built), changed(CPU, instruction_set=found), policy)

    assert bool(result) == is_match
    if not is_match:
        assert str(result) == f"instruction set: engine expects {built}, found {found}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("built", "found"), [("avx99", "amx"), ("avx2", "avx99"), ("avx98", "avx99")])
def test_unknown_instruction_set_is_a_mismatch_and_no_failure(built, found, policy):
    # As in the manifest of a later version of the mesh.
    assert not verdict(changed(CPU, instruction_set=built), changed(CPU, instruction_set=found), policy)


def test_name_of_a_cpu_does_not_matter():
    assert verdict(CPU, changed(CPU, device_name="Xeon", memory_bytes=1))


@pytest.mark.parametrize(
    ("actual", "reason"),
    [
        ({}, "tensorrt_llm version: engine expects 1.2.1, found none"),
        ({"tensorrt_llm": "1.2.0"}, "tensorrt_llm version: engine expects 1.2.1, found 1.2.0"),
    ],
)
def test_other_version_of_a_tool_never_matches(actual, reason):
    # Field case 31.
    manifest = engines.manifest(target=A100, versions={"tensorrt_llm": "1.2.1"})

    for policy in POLICIES:
        assert str(match(manifest, A100, actual, policy)) == reason


def test_versions_that_the_manifest_does_not_name_do_not_matter():
    manifest = engines.manifest(target=A100, versions={"tensorrt": "10"})

    assert match(manifest, A100, {"tensorrt": "10", "more": "1"})


def test_all_reasons_are_given():
    manifest = engines.manifest(target=A100, versions={"b": "1", "a": "1"})
    found = match(manifest, A10, {"b": "2"})

    assert [each.what for each in found.reasons] == [
        "compute capability",
        "device name",
        "memory",
        "a version",
        "b version",
    ]


def test_required_match_raises_with_expected_and_actual():
    manifest = engines.manifest(target=A100)
    require_match(manifest, A100, {})

    with pytest.raises(
        PreconditionError, match=r"compute capability: engine expects 8\.0, found 8\.6"
    ) as seen:
        require_match(manifest, A10, {}, "compatible")
    assert seen.value.reason == "ENGINE_MISMATCH"
    assert seen.value.metadata == {
        "subject": f"engines/{manifest.digest}",
        "what": "compute capability",
        "expected": "8.0",
        "actual": "8.6",
    }


GPUS = st.builds(
    Target,
    device_type=st.just("gpu"),
    device_name=st.sampled_from(["NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA X1"]),
    compute_capability=st.sampled_from(["8.0", "8.9", "9.0", "12.0"]),
    mig_profile=st.sampled_from(["", "1g.10gb", "3g.40gb"]),
    memory_bytes=st.sampled_from([24 * GIB, 40 * GIB, 80 * GIB, 80 * GIB + 1]),
    cuda_major=st.sampled_from([12, 13]),
)
CPUS = st.builds(
    Target,
    device_type=st.just("cpu"),
    device_name=st.sampled_from(["EPYC", "Xeon"]),
    architecture=st.sampled_from(["x86_64", "aarch64"]),
    instruction_set=st.sampled_from(INSTRUCTION_SET_ORDER),
)


@given(GPUS | CPUS, GPUS | CPUS)
def test_devices_share_a_key_exactly_if_they_share_engines(first, second):
    assert (first.key == second.key) == bool(verdict(first, second))


@given(GPUS | CPUS, GPUS | CPUS)
def test_each_policy_allows_what_the_stricter_one_does(built, found):
    allowed = [bool(verdict(built, found, policy)) for policy in POLICIES]

    assert allowed == sorted(allowed)
