"""Rules between fields, and what a kind cannot do: refused when a file is read."""

from __future__ import annotations

import pytest

from build_worker.backends import load_builder
from mesh.errors import InvalidFieldError
from mesh.model_file import ModelFile
from mesh.model_rules import problems

TRT = {"kind": "tensorrt_llm", "source": "x"}
VLLM = {"kind": "vllm", "source": "x"}
CPU = {"kind": "openvino", "source": "x"}
FAKE = {"kind": "fake"}
DRAFT = {"method": "draft_model", "source": "d"}


def adapters(*names):
    return [{"name": name, "source": "a"} for name in names]


def found(fields):
    return list(problems(ModelFile(model="m", **fields)))


@pytest.mark.parametrize(
    "fields",
    [
        FAKE,
        {**CPU, "precision": "int4", "kv_cache_precision": "u8", "speculation": DRAFT, "lora": adapters("a")},
        {**CPU, "speculation": {"method": "prompt_lookup", "tokens": 5, "ngram_size": 3}},
        {**CPU, "targets": ["cpu-x86_64-avx512", "cpu-aarch64-neon"], "options": {"profile": "fast"}},
        {**TRT, "precision": "fp8", "calibration": {}, "targets": ["l4", "h100-sxm-80gb:mig-1g.10gb"]},
        {**TRT, "targets": ["sm86-nvidia-rtx-a6000-48g-cuda12"]},
        {**TRT, "speculation": {"method": "lookahead", "ngram_size": 3}},
        {**TRT, "tensor_parallel": 8, "pipeline_parallel": 2, "lora": adapters("a", "b")},
        {**VLLM, "max_num_tokens": 512, "max_batch_size": 512, "max_input_len": 10, "max_seq_len": 10},
        {**FAKE, "serving": {"min_workers": 2, "max_workers": 2}},
        {**FAKE, "serving": {"min_workers": 2}},
    ],
)
def test_what_the_kind_can_do_is_right(fields):
    assert found(fields) == []


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"kind": "tensort_llm"}, "kind", "did you mean tensorrt_llm? there are openvino"),
        ({"kind": "openvino"}, "source", "required for kind openvino"),
        ({**TRT, "targets": ["l4", "l4"]}, "targets[1]", "twice"),
        ({**TRT, "targets": ["h300"]}, "targets[0]", "no target is named 'h300'"),
        ({**TRT, "targets": ["h100-sxm-80gb:mig-9g.10gb"]}, "targets[0]", "no such slice"),
        (
            {**TRT, "targets": ["cpu-x86_64-avx2"]},
            "targets[0]",
            "is a cpu, and kind tensorrt_llm runs on a gpu",
        ),
        ({**CPU, "targets": ["l4"]}, "targets[0]", "is a gpu, and kind openvino runs on a cpu"),
        ({**TRT, "precision": "fp8", "targets": ["l4", "a100-sxm-80gb"]}, "targets[1]", "compute in fp8"),
        ({**TRT, "precision": "nvfp4", "targets": ["h200"]}, "targets[0]", "compute in nvfp4"),
        ({**TRT, "kv_cache_precision": "fp8", "targets": ["a10"]}, "targets[0]", "compute in fp8"),
        ({**CPU, "precision": "in8"}, "precision", "did you mean int8? there are int8, int4, fp16"),
        ({**FAKE, "precision": "int8"}, "precision", "there are none"),
        (
            {**FAKE, "kv_cache_precision": "fp8"},
            "kv_cache_precision",
            "no choice of precision for a KV cache",
        ),
        ({**CPU, "kv_cache_precision": "u9"}, "kv_cache_precision", "f16, u8"),
        ({**CPU, "calibration": {}}, "calibration", "int8 of kind openvino is made without"),
        ({**TRT, "calibration": {}}, "calibration", "with calibration: fp8, int8_sq"),
        ({**TRT, "max_input_len": 11, "max_seq_len": 10}, "max_input_len", "11 is over max_seq_len, 10"),
        (
            {**VLLM, "max_num_tokens": 8, "max_batch_size": 9},
            "max_num_tokens",
            "8 is less than max_batch_size",
        ),
        ({**CPU, "tensor_parallel": 2}, "tensor_parallel", "takes 1 at most, not 2"),
        ({**CPU, "pipeline_parallel": 2}, "pipeline_parallel", "takes 1 at most, not 2"),
        (
            {**CPU, "speculation": {"method": "lookahead"}},
            "speculation.method",
            "only draft_model, prompt_lookup",
        ),
        ({**FAKE, "speculation": DRAFT}, "speculation.method", "nor any other"),
        ({**TRT, "speculation": DRAFT}, "speculation.method", "only medusa, eagle, lookahead"),
        ({**CPU, "speculation": {"method": "draft_model"}}, "speculation.source", "required for draft_model"),
        (
            {**CPU, "speculation": {**DRAFT, "precision": "fp8"}},
            "speculation.precision",
            "no 'fp8' for weights",
        ),
        (
            {**CPU, "speculation": {**DRAFT, "ngram_size": 3}},
            "speculation.ngram_size",
            "draft_model has no such",
        ),
        (
            {**CPU, "speculation": {"method": "prompt_lookup", "source": "d"}},
            "speculation.source",
            "prompt_lookup has no such",
        ),
        (
            {**TRT, "speculation": {"method": "lookahead", "tokens": 3}},
            "speculation.tokens",
            "has no such field",
        ),
        ({**CPU, "lora": adapters("a", "b")}, "lora[1]", "takes 1 at most, not 2"),
        ({**TRT, "lora": adapters("a", "b", "a")}, "lora[2].name", "a is there twice"),
        ({**CPU, "options": {"profle": "fast"}}, "options.profle", "did you mean profile?"),
        ({**CPU, "options": {"profile": "slow"}}, "options.profile", "one of exact, fast"),
        ({**FAKE, "options": {"step_ms": "-1"}}, "options.step_ms", "a number from 0 to 1000000"),
        ({**FAKE, "serving": {"min_workers": 3, "max_workers": 2}}, "serving.min_workers", "3 is over"),
    ],
)
def test_what_is_wrong_is_named(fields, field, words):
    (first, *_) = found(fields)

    assert first[0] == field
    assert words in first[1]


@pytest.mark.parametrize(
    "fields", [{**FAKE, "precision": "int8"}, {**CPU, "lora": adapters("a", "b")}, {"kind": "openvino"}]
)
def test_builders_refuse_by_the_same_rules(fields):
    spec = ModelFile(model="m", **fields)
    with pytest.raises(InvalidFieldError) as caught:
        load_builder(spec.kind).validate(spec)

    assert (caught.value.field, caught.value.description) == (
        f"spec.{found(fields)[0][0]}",
        found(fields)[0][1],
    )
