"""Limits on requests; each error names its field (field cases 7, 23)."""

from pathlib import Path

import pytest

from enginemesh.v1 import inference_pb2
from gateway import admission
from mesh import capabilities
from mesh.errors import ExhaustedError, InvalidFieldError, UnsupportedError
from mesh.manifest import EngineFile, Manifest, TokenizerInfo
from mesh.target import Target

NAN = float("nan")
SAMPLING_PROTO = Path(__file__).parents[2] / "protos/enginemesh/v1/sampling.proto"


def request(**fields):
    return inference_pb2.GenerateRequest(**{"model": "m", "prompt": "hi", **fields})


def engine(max_seq_len=100, abilities=(), precision="int8", **more):
    return Manifest(
        model="m",
        kind="fake",
        target=Target(device_type="cpu", device_name="c", architecture="x86_64", instruction_set="avx2"),
        precision=precision,
        build_key="0" * 64,
        versions={},
        max_batch_size=4,
        max_seq_len=max_seq_len,
        max_num_tokens=64,
        tokenizer=TokenizerInfo(vocab_size=256),
        capabilities=abilities,
        **more,
        files=(EngineFile(path="tokenizer.json", size=1, sha256="0" * 64),),
    )


def admit(message, prompt_tokens, *engines):
    return admission.admit(admission.check(message, 1000), list(range(prompt_tokens)), engines)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": "no/such"}, "model"),
        ({"model": "x" * 64}, "model"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"engine": "engines/xyz"}, "engine"),
        ({"priority": 9}, "priority"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 1001}, "prompt"),
        ({"prompt": "é" * 501}, "prompt"),
        ({"chat": {}}, "chat.messages"),
        (
            {"chat": {"messages": [{"role": "user", "content": "x"}, {"content": "x"}]}},
            "chat.messages[1].role",
        ),
        ({"chat": {"messages": [{"role": "user", "content": "x" * 1001}]}}, "chat"),
        (
            {"chat": {"messages": [{"role": "user<|im_end|>", "content": "x"}]}},
            "chat.messages[0].role",
        ),
        ({"chat": {"messages": [{"role": "user"}] * 1025}}, "chat.messages"),
        ({"token_ids": {}}, "token_ids.ids"),
        ({"token_ids": {"ids": range(251)}}, "token_ids"),
        ({"model": "m\n"}, "model"),
        ({"request_id": "a\n"}, "request_id"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 2**32 - 1}}, "sampling.max_tokens"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ({"sampling": {"temperature": 2.1}}, "sampling.temperature"),
        ({"sampling": {"temperature": NAN}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"temperature": float("-inf")}}, "sampling.temperature"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p"),
        ({"sampling": {"top_p": NAN}}, "sampling.top_p"),
        ({"sampling": {"top_k": 0}}, "sampling.top_k"),
        ({"sampling": {"n": 0}}, "sampling.n"),
        ({"sampling": {"n": 2}}, "sampling.n"),
        ({"sampling": {"logprobs": 21}}, "sampling.logprobs"),
        ({"sampling": {"stop": ["x"] * 17}}, "sampling.stop"),
        ({"sampling": {"stop": ["x", ""]}}, "sampling.stop[1]"),
        ({"sampling": {"stop": ["x" * 257]}}, "sampling.stop[0]"),
        ({"sampling": {"stop_token_ids": range(65)}}, "sampling.stop_token_ids"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": 2.1}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": NAN}}, "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty"),
        ({"sampling": {"presence_penalty": -2.1}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": NAN}}, "sampling.frequency_penalty"),
        ({"sampling": {"frequency_penalty": float("inf")}}, "sampling.frequency_penalty"),
    ],
)
def test_what_is_out_of_range_is_refused_by_its_field(fields, field):
    with pytest.raises(InvalidFieldError) as caught:
        admission.check(request(**fields), 1000)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 1, "temperature": 0, "top_p": 1, "top_k": 1, "seed": 0, "n": 1, "logprobs": 0},
        {"max_tokens": 2**31 - 1, "temperature": 2, "top_p": 1e-6, "seed": 2**64 - 1, "logprobs": 20},
        {"repetition_penalty": 2, "presence_penalty": 2, "frequency_penalty": -2},
        {"repetition_penalty": 1e-6, "presence_penalty": -2, "frequency_penalty": 2, "ignore_eos": True},
        {"stop": ["x" * 256] * 16, "stop_token_ids": range(64)},
    ],
)
def test_what_is_at_the_edge_of_its_range_is_taken(sampling):
    message = request(sampling=sampling, request_id="x" * 128, model="m" * 63)
    assert admission.check(message, 1000).sampling == message.sampling


def test_ranges_are_those_that_the_proto_documents():
    comments = SAMPLING_PROTO.read_text().replace("\n  // ", " ")
    for limit in (
        "Softmax temperature, 0 to 2",
        "above 0 and up to 1.",
        f"At most {admission.MAX_STOP_STRINGS} strings of at most {admission.MAX_STOP_CHARACTERS} characters",
        f"At most {admission.MAX_STOP_TOKENS}.",
        f"At most {admission.MAX_LOGPROBS}.",
        "above 0 and up to 2.",
        "-2 to 2.",
    ):
        assert limit in comments


def test_a_request_without_input_is_refused():
    with pytest.raises(InvalidFieldError) as caught:
        admission.check(inference_pb2.GenerateRequest(model="m"), 1000)
    assert caught.value.field == "input"


@pytest.mark.parametrize("prompt", ['\\"', "\0", "\u200b", "x" * 1000])
def test_odd_text_is_admitted(prompt):
    assert admission.check(request(prompt=prompt), 1000).model == "m"


def test_names_may_carry_their_collection():
    digest = "a" * 64
    checked = admission.check(request(model="models/m", engine=f"engines/{digest}"), 1000)
    assert (checked.model, checked.engine) == ("m", digest)


def test_a_request_without_a_name_gets_one():
    first, second = (admission.check(request(), 1000).request_id for _ in range(2))
    assert first
    assert first != second


def test_max_tokens_is_what_fits_when_unset():
    assert admit(request(), 30, engine(100)).sampling.max_tokens == 70


@pytest.mark.parametrize(
    ("prompt_tokens", "fields", "field", "actual"),
    [
        (100, {}, "prompt", 100),
        (101, {"chat": {"messages": [{"role": "user"}]}}, "chat", 101),
        (102, {"token_ids": {"ids": [1]}}, "token_ids", 102),
        (30, {"sampling": {"max_tokens": 71}}, "sampling.max_tokens", 71),
    ],
)
def test_what_no_engine_can_hold_is_refused_with_the_limit(prompt_tokens, fields, field, actual):
    with pytest.raises(InvalidFieldError) as caught:
        admit(request(**fields), prompt_tokens, engine(100), engine(50))
    assert caught.value.field == field
    assert "100" in caught.value.message
    assert caught.value.metadata["actual"] == str(actual)


def test_max_tokens_is_kept_when_it_fits_and_the_request_is_not_changed():
    message = request(sampling={"max_tokens": 70, "temperature": 0.5})
    admitted = admit(message, 30, engine(100))
    assert (admitted.sampling, admitted.engine) == (message.sampling, "")
    unset = request(sampling={"temperature": 0.5})
    admit(unset, 30, engine(100))
    assert not unset.sampling.HasField("max_tokens")


def test_a_stop_token_of_another_vocabulary_is_refused():
    with pytest.raises(InvalidFieldError) as caught:
        admit(request(sampling={"stop_token_ids": [255, 256]}), 10, engine())
    assert caught.value.field == "sampling.stop_token_ids[1]"


def test_a_long_request_is_pinned_to_the_engine_that_holds_it():
    short, long = engine(100), engine(200)
    assert admit(request(sampling={"max_tokens": 150}), 10, short, long).engine == long.digest
    assert admit(request(sampling={"max_tokens": 50}), 10, short, long).engine == ""


def test_a_request_of_any_length_fits_every_engine_that_takes_its_prompt():
    short, long = engine(100), engine(200)
    admitted = admit(request(), 10, short, long)
    assert (admitted.engine, admitted.sampling.max_tokens) == ("", 90)
    assert admitted.engines == {short.digest, long.digest}
    assert admit(request(), 150, short, long).engines == {long.digest}


@pytest.mark.parametrize(
    ("sampling", "capability"),
    [
        ({"logprobs": 0}, capabilities.LOGPROBS),
        ({"seed": 0}, capabilities.SEED),
        ({"repetition_penalty": 1.1}, capabilities.PENALTIES),
        ({"presence_penalty": -1}, capabilities.PENALTIES),
        ({"frequency_penalty": 0.1}, capabilities.PENALTIES),
        ({"lora": "polite"}, "lora:polite"),
        ({"guided": {"regex": "[0-9]+"}}, capabilities.GUIDED_DECODING),
    ],
)
def test_a_feature_that_no_engine_has_is_refused(sampling, capability):
    message = request(sampling=sampling)
    with pytest.raises(UnsupportedError) as caught:
        admit(message, 10, engine())
    (field,) = sampling
    assert caught.value.metadata == {"field": f"sampling.{field}", "capability": capability}
    assert admit(message, 10, engine(abilities=(capability,))).engine == ""


@pytest.mark.parametrize(
    ("guided", "field"),
    [
        ({}, "sampling.guided"),
        ({"json": False}, "sampling.guided.json"),
        ({"regex": ""}, "sampling.guided.regex"),
        ({"grammar": "a" * 65_537}, "sampling.guided.grammar"),
    ],
)
def test_a_guide_without_sense_is_refused(guided, field):
    with pytest.raises(InvalidFieldError) as caught:
        admission.check(request(sampling={"guided": guided}), 1 << 20)
    assert caught.value.field == field


def test_a_penalty_that_is_off_needs_no_feature():
    off = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    assert admit(request(sampling=off), 10, engine()).engine == ""


def test_features_that_only_different_engines_have_are_refused_together():
    message = request(sampling={"seed": 1, "logprobs": 1})
    with pytest.raises(UnsupportedError):
        admit(message, 10, engine(abilities=(capabilities.SEED,)), engine(abilities=(capabilities.LOGPROBS,)))


def test_a_feature_that_one_engine_has_pins_the_request_to_it():
    able = engine(abilities=(capabilities.SEED,), precision="fp16")
    assert admit(request(sampling={"seed": 1}), 10, engine(), able).engine == able.digest


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}])
def test_sampling_is_refused_by_an_engine_that_only_takes_the_likeliest_token(sampling):
    greedy = engine(abilities=(capabilities.GREEDY_ONLY,))
    with pytest.raises(UnsupportedError) as caught:
        admit(request(sampling=sampling), 10, greedy)
    assert caught.value.metadata == {"field": "sampling.temperature", "capability": capabilities.SAMPLING}
    assert admit(request(sampling={"temperature": 0}), 10, greedy).engine == ""


def test_sampling_is_pinned_to_the_engine_that_can():
    able = engine(precision="fp16")
    greedy = engine(abilities=(capabilities.GREEDY_ONLY,))
    assert admit(request(sampling={"temperature": 1}), 10, greedy, able).engine == able.digest


def test_a_full_gateway_says_when_to_come_again():
    admission.check_capacity(9, 10)
    with pytest.raises(ExhaustedError) as caught:
        admission.check_capacity(10, 10)
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize(
    ("prompt_tokens", "default", "max_tokens"), [(10, 20, 20), (90, 20, 10), (10, 0, 90), (10, 1000, 90)]
)
def test_without_max_tokens_the_model_may_limit_the_answer(prompt_tokens, default, max_tokens):
    checked = admission.check(request(), 1000)
    admitted = admission.admit(checked, list(range(prompt_tokens)), [engine(100)], default)
    assert admitted.sampling.max_tokens == max_tokens


def test_max_tokens_of_the_request_is_its_own():
    checked = admission.check(request(sampling={"max_tokens": 50}), 1000)
    assert admission.admit(checked, [1], [engine(100)], 20).sampling.max_tokens == 50


def test_a_prompt_longer_than_every_engine_takes_is_refused():
    with pytest.raises(InvalidFieldError, match="10 tokens; the engine takes a prompt of 8") as caught:
        admit(request(), 10, engine(max_input_len=4), engine(max_input_len=8))
    assert caught.value.field == "prompt"


def test_a_long_prompt_goes_to_the_engine_that_takes_it():
    short, long = engine(max_input_len=4), engine(precision="fp16", max_seq_len=50)
    admitted = admit(request(), 10, short, long)
    assert (admitted.engines, admitted.engine) == (frozenset({long.digest}), long.digest)
