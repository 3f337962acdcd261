"""Every option of a model file of kind tensorrt_llm ends up where it belongs, and the contract takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from build_worker.backends import tensorrt_llm_flags as flags
from build_worker.backends.tensorrt_llm import _options
from mesh.contract import Contract, flag_values
from mesh.errors import BuildError, InvalidFieldError
from mesh.model_file import ModelFile, ModelFileError

CONTRACT = Contract.load("tensorrt_llm")
SWITCHES = CONTRACT.cli["trtllm-build"]["switches"]


def spec(**fields) -> ModelFile:
    made = ModelFile(**{"model": "m", "kind": "tensorrt_llm", "source": "s", **fields})
    made.check()
    return made


def words_of(made, draft_len=0, adapters=()):
    return flags.build_flags(made, made.max_seq_len or 512, draft_len, adapters)


def values_of(option):
    """Text of every form that an option takes."""
    if option.type == "boolean":
        return ("true", "false")
    if option.type == "choice":
        return option.choices
    if option.type == "text":
        return ("attn_q attn_v",)
    return (str(max(1, int(option.low))), "7") if option.type == "integer" else ("0.5",)


OPTIONS = [
    (name, text)
    for name, option in flags.KIND.options.items()
    if name not in flags.AT_RUN_TIME
    for text in values_of(option)
]


@pytest.mark.parametrize(("name", "text"), OPTIONS)
def test_option_reaches_the_command_line_and_keeps_the_contract(name, text):
    words = words_of(spec(options={name: text}))

    assert CONTRACT.flag_problems("trtllm-build", words) == []
    found = dict(flag_values(words)).get(name)
    if name in SWITCHES:
        assert found == ([] if text == "true" else None)
    elif flags.KIND.options[name].type == "boolean":
        assert found == ["enable" if text == "true" else "disable"]
    else:
        assert found == text.split()


RUN_TIME_VALUES = {
    "free_gpu_memory_fraction": "0.5",
    "enable_block_reuse": "false",
    "enable_chunked_prefill": "false",
    "capacity_scheduler_policy": "MAX_UTILIZATION",
    "medusa_choices": "[[0],[0,0]]",
    "lookahead_window": "5",
    "lookahead_verification": "6",
}


def test_options_of_the_run_are_told_apart():
    assert set(RUN_TIME_VALUES) == flags.AT_RUN_TIME


@pytest.mark.parametrize(("name", "text"), RUN_TIME_VALUES.items())
def test_option_of_the_run_reaches_the_manifest_and_not_the_command_line(name, text):
    made = spec(options={name: text})

    assert _options(made)[name] == text
    assert name not in dict(flag_values(words_of(made)))


FIELDS = [
    ({"max_batch_size": 9}, "max_batch_size", ["9"]),
    ({"max_seq_len": 300}, "max_seq_len", ["300"]),
    ({"max_seq_len": 300}, "max_input_len", ["299"]),
    ({"max_num_tokens": 999}, "max_num_tokens", ["999"]),
    ({"tensor_parallel": 2, "pipeline_parallel": 3}, "workers", ["6"]),
    ({}, "kv_cache_type", ["paged"]),
    ({}, "remove_input_padding", ["enable"]),
    ({"speculation": {"method": "lookahead"}}, "speculative_decoding_mode", ["lookahead_decoding"]),
    (
        {"speculation": {"method": "medusa", "source": "h"}},
        "speculative_decoding_mode",
        ["medusa"],
    ),
    ({"speculation": {"method": "eagle", "source": "h"}}, "speculative_decoding_mode", ["eagle"]),
    ({"speculation": {"method": "eagle", "source": "h"}}, "max_draft_len", ["5"]),
    ({"lora": [{"name": "a", "source": "x"}, {"name": "b", "source": "y"}]}, "lora_dir", ["/0", "/1"]),
    ({"lora": [{"name": "a", "source": "x"}]}, "lora_plugin", ["auto"]),
    (
        {"lora": [{"name": "a", "source": "x"}], "options": {"lora_plugin": "float16"}},
        "lora_plugin",
        ["float16"],
    ),
]


@pytest.mark.parametrize(("fields", "name", "value"), FIELDS)
def test_field_reaches_the_command_line(fields, name, value):
    made = spec(**fields)
    words = words_of(made, 5, [Path(f"/{number}") for number in range(len(made.lora))])

    assert dict(flag_values(words))[name] == value
    assert [flag for flag, _ in flag_values(words)].count(name) == 1
    assert CONTRACT.flag_problems("trtllm-build", words) == []


def test_unknown_option_fails_when_the_file_is_read(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model: m\nkind: tensorrt_llm\nsource: s\noptions:\n  gemm_plugn: auto\n")

    with pytest.raises(ModelFileError, match="gemm_plugin"):
        ModelFile.load(path)


@pytest.mark.parametrize(("name", "text"), [("gemm_plugin", "int3"), ("tokens_per_block", "many")])
def test_value_that_an_option_cannot_have_fails_when_the_file_is_read(name, text):
    with pytest.raises(InvalidFieldError, match=name) as caught:
        spec(options={name: text})
    assert caught.value.field == f"spec.options.{name}"


def test_unknown_field_fails_when_the_file_is_read():
    with pytest.raises(ValidationError):
        spec(max_output_len=5)


@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"options": {"multiple_profiles": "true", "opt_num_tokens": "5"}}, "opt_num_tokens"),
        (
            {"options": {"gather_context_logits": "true"}, "speculation": {"method": "lookahead"}},
            "gather_context_logits",
        ),
        ({"options": {"context_fmha": "false"}}, "context_fmha"),
        ({"options": {"lora_plugin": "disable"}, "lora": [{"name": "a", "source": "x"}]}, "lora_plugin"),
    ],
)
def test_options_that_exclude_each_other_are_refused(fields, blamed):
    with pytest.raises(InvalidFieldError) as caught:
        flags.check(spec(**fields))
    assert caught.value.field == f"spec.options.{blamed}"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max_output_len", "5"], "no option --max_output_len"),
        (["--strip_plan", "enable"], "takes no value"),
        (["--gemm_plugin"], "has no value"),
        (["--gemm_plugin", "int3"], "int3"),
        (["--context_fmha", "true"], "enable or disable"),
        (["--max_batch_size", "eight"], "whole number"),
        (["--max_batch_size", "8", "9"], "more than one value"),
    ],
)
def test_command_line_against_the_contract_is_not_run(words, problem):
    with pytest.raises(BuildError, match=problem):
        flags.require_contract(words)


def test_lookahead_length_is_that_of_its_published_formula():
    assert flags.lookahead_draft_len(1, 1, 0) == 0
    assert flags.lookahead_draft_len(4, 3, 4) == 15
    assert flags.lookahead_draft_len(7, 7, 7) == 83


def test_lookahead_tells_the_runner_what_the_engine_was_built_for():
    made = spec(speculation={"method": "lookahead", "ngram_size": 5}, options={"lookahead_window": "6"})

    options = _options(made)

    assert options["speculation"] == "lookahead"
    names = ("lookahead_window", "lookahead_ngram", "lookahead_verification")
    assert [options[name] for name in names] == ["6", "5", "4"]
