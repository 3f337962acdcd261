"""The contract with TensorRT-LLM."""

from __future__ import annotations

import pytest

from mesh.contract import Contract

CONTRACT = Contract.load("tensorrt_llm")


def test_right_arguments_have_no_problems():
    assert CONTRACT.problems("ExecutorConfig", {"max_batch_size": 8, "enable_chunked_context": True}) == []
    assert CONTRACT.problems("Request", {"input_token_ids": [1], "max_tokens": 4, "end_id": None}) == []
    assert CONTRACT.problems("PluginConfig", {"gemm_plugin": "disable", "context_fmha": "enable"}) == []


@pytest.mark.parametrize(
    ("class_name", "arguments", "problem"),
    [
        ("Request", {"max_tokens": 4}, "Request: input_token_ids is required"),
        ("Request", {"input_token_ids": [1], "max_tokens": "4"}, "Request.max_tokens: str, want int"),
        ("SamplingConfig", {"topk": 1}, "SamplingConfig: no argument 'topk'"),
        ("SamplingConfig", {"seed": True}, "SamplingConfig.seed: bool, want Optional[int]"),
        ("executor.KvCacheConfig", {"enable_block_reuse": None}, "None, want bool"),
        ("PluginConfig", {"gemm_plugn": "auto"}, "PluginConfig: no argument 'gemm_plugn'"),
        ("PluginConfig", {"gemm_plugin": "int3"}, "'int3', want one of auto"),
        ("TrtLlmArgs", {"model": "m", "max_output_len": 8}, "no argument 'max_output_len'"),
    ],
)
def test_wrong_arguments_are_told(class_name, arguments, problem):
    problems = CONTRACT.problems(class_name, arguments)
    assert len(problems) == 1
    assert problem in problems[0]


def test_arguments_of_base_classes_count():
    assert "kv_cache_config" in CONTRACT.parameters("TrtLlmArgs")


def test_flags_of_the_builder_are_read_with_their_other_names():
    flags = CONTRACT.flags("trtllm-build")
    assert {"checkpoint_dir", "output_dir", "max_seq_len", "max_decoder_seq_len", "kv_cache_type"} <= flags
    assert "max_draft_len" in flags
