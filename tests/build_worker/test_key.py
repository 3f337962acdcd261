"""The build key: one engine per combination of weights, spec, target and tools."""

from __future__ import annotations

import pytest

from build_worker.key import build_key
from mesh.model_file import ModelFile
from mesh.target import Target

SPEC = ModelFile(model="m", kind="openvino", source="a.gguf", precision="int8")
VERSIONS = {"openvino": "1", "recipe": "1"}


def gpu(**fields):
    base = {"device_name": "NVIDIA A100", "compute_capability": "8.0", "memory_bytes": 80 << 30}
    return Target(device_type="gpu", **{**base, "cuda_major": 12, **fields})


def key(source="w", spec=SPEC, target=None, versions=None):
    return build_key(source, spec, target or gpu(), versions or VERSIONS)


# Field case 32: a cache whose key lacked GPU and weights handed one GPU's engine to another.
@pytest.mark.parametrize(
    "other",
    [
        {"source": "other weights at the same path"},
        {"target": gpu(compute_capability="9.0")},
        {"target": gpu(device_name="NVIDIA A30")},
        {"target": gpu(memory_bytes=40 << 30)},
        {"target": gpu(mig_profile="3g.40gb")},
        {"target": gpu(cuda_major=13)},
        {"target": Target(device_type="cpu", device_name="x", architecture="x86_64", instruction_set="avx2")},
        {"spec": SPEC.model_copy(update={"precision": "int4"})},
        {"spec": SPEC.model_copy(update={"max_seq_len": 100})},
        {"spec": SPEC.model_copy(update={"options": {"profile": "fast"}})},
        {"versions": {**VERSIONS, "openvino": "2"}},
        {"versions": {**VERSIONS, "recipe": "2"}},
    ],
)
def test_what_changes_the_engine_changes_the_key(other):
    assert key(**other) != key()


def test_same_weights_elsewhere_have_the_same_key():
    assert key(spec=SPEC.model_copy(update={"source": "s3://bucket/a.gguf"})) == key()


def test_order_of_versions_and_options_does_not_count():
    spec = SPEC.model_copy(update={"options": {"a": "1", "b": "2"}})
    turned = SPEC.model_copy(update={"options": {"b": "2", "a": "1"}})

    assert key(spec=spec, versions={"a": "1", "b": "2"}) == key(spec=turned, versions={"b": "2", "a": "1"})
