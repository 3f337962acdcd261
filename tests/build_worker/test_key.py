"""The build key: one engine per combination of weights, spec, target and tools."""

from __future__ import annotations

import pytest

from build_worker.key import build_key
from mesh.gpus import target_names
from mesh.model_file import ModelFile
from mesh.target import Target

SPEC = ModelFile(model="m", kind="openvino", source="a.gguf", precision="int8")
VERSIONS = {"openvino": "1", "recipe": "1"}


def gpu(**fields):
    base = {"device_name": "NVIDIA A100", "compute_capability": "8.0", "memory_bytes": 80 << 30}
    return Target(device_type="gpu", **{**base, "cuda_major": 12, **fields})


def key(source="w", spec=SPEC, target=None, versions=None, more_digests=None):
    return build_key(source, spec, target or gpu(), versions or VERSIONS, more_digests)


def asking(**fields):
    """The spec with other fields, as it would be read."""
    return ModelFile.model_validate({**SPEC.model_dump(), **fields})


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
        {"spec": asking(kv_cache_precision="u8")},
        {"spec": asking(calibration={"samples": 100})},
        {"spec": asking(max_input_len=100)},
        {"spec": asking(max_batch_size=2)},
        {"spec": asking(max_num_tokens=512)},
        {"spec": asking(tensor_parallel=2)},
        {"spec": asking(pipeline_parallel=2)},
        {"spec": asking(speculation={"method": "prompt_lookup"})},
        {"spec": asking(chat_template="{{ messages }}")},
        {"versions": {**VERSIONS, "openvino": "2"}},
        {"versions": {**VERSIONS, "recipe": "2"}},
    ],
)
def test_what_changes_the_engine_changes_the_key(other):
    assert key(**other) != key()


def test_same_weights_elsewhere_have_the_same_key():
    assert key(spec=SPEC.model_copy(update={"source": "s3://bucket/a.gguf"})) == key()


def test_what_is_no_part_of_the_engine_does_not_count():
    spec = asking(targets=["cpu-x86_64-avx2", "cpu-x86_64-avx512"], serving={"max_waiting_s": 5.0})

    assert key(spec=spec) == key()
    assert key(spec=asking(max_seq_len=0)) == key()


DRAFT_FIELD = "speculation.source"


def test_draft_model_and_adapters_count_by_their_content():
    draft = {"method": "draft_model", "source": "draft.gguf"}
    one = key(spec=asking(speculation=draft), more_digests={DRAFT_FIELD: "1"})

    elsewhere = asking(speculation={**draft, "source": "s3://bucket/draft.gguf"})
    assert key(spec=elsewhere, more_digests={DRAFT_FIELD: "1"}) == one
    assert key(spec=elsewhere, more_digests={DRAFT_FIELD: "2"}) != one
    adapters = [{"name": "a", "source": "x"}, {"name": "b", "source": "y"}]
    digests = {"lora[0].source": "1", "lora[1].source": "2"}
    turned = {"lora[0].source": "2", "lora[1].source": "1"}
    both = asking(lora=adapters)
    assert key(spec=both, more_digests=digests) != key(spec=both, more_digests=turned)


@pytest.mark.parametrize("more_digests", [{}, {DRAFT_FIELD: "1", "lora[0].source": "2"}])
def test_every_source_has_its_digest(more_digests):
    spec = asking(speculation={"method": "draft_model", "source": "draft.gguf"})

    with pytest.raises(ValueError, match=r"speculation\.source"):
        key(spec=spec, more_digests=more_digests)


def test_order_of_versions_and_options_does_not_count():
    spec = SPEC.model_copy(update={"options": {"a": "1", "b": "2"}})
    turned = SPEC.model_copy(update={"options": {"b": "2", "a": "1"}})

    assert key(spec=spec, versions={"a": "1", "b": "2"}) == key(spec=turned, versions={"b": "2", "a": "1"})


def test_every_known_gpu_and_slice_has_a_key_of_its_own():
    keys = {key(target=Target.from_name(name)) for name in target_names()}

    assert len(keys) == len(target_names())
