"""Answers stream to standard output, figures to standard error."""

from __future__ import annotations

import json

import pytest

from cli.failures import CommandError
from enginemesh.v1 import inference_pb2, models_pb2
from mesh.errors import AttemptsExhaustedError, InvalidFieldError


@pytest.fixture
def answer(gateway):
    """Two deltas and an end."""
    gateway.models.append(models_pb2.Model(name="models/smol"))
    finished = inference_pb2.Finished(
        reason=inference_pb2.FINISH_REASON_STOP,
        usage=inference_pb2.Usage(prompt_tokens=7, completion_tokens=3),
        request_id="req-1",
    )
    gateway.answer += [
        inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="Blue ")),
        inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="ü.")),
        inference_pb2.GenerateResponse(finished=finished),
    ]
    return gateway


def test_prompt_from_arguments_becomes_chat_for_the_only_model(answer, invoke):
    result = invoke("generate", "Why", "blue?")
    assert result.stdout == "Blue ü.\n"
    (request,) = answer.requests
    assert request.model == "smol"
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "Why blue?")]
    assert request.priority == inference_pb2.PRIORITY_NORMAL
    assert request.sampling.ListFields() == []


def test_figures_go_to_standard_error(answer, invoke):
    result = invoke("generate", "hi")
    assert "7 tokens in, 3 out · stop · request req-1" in result.stderr
    assert "tokens/s" in result.stderr


def test_options_reach_the_request(answer, invoke):
    invoke(
        *("generate", "--raw", "-m", "other", "-n", "5", "-t", "0", "--top-k", "3", "--seed", "9"),
        *("--stop", "a", "--stop", "b", "--priority", "low", "--engine", "ab12", "--request-id", "mine", "x"),
    )
    (request,) = answer.requests
    assert request.prompt == "x"
    assert request.model == "other"
    assert request.engine == "engines/ab12"
    assert request.request_id == "mine"
    assert request.priority == inference_pb2.PRIORITY_LOW
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (5, 0, 3, 9)
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert list(sampling.stop) == ["a", "b"]


def test_prompt_from_standard_input(answer, invoke):
    invoke("generate", "--system", "Be brief.", input="from a pipe")
    (request,) = answer.requests
    assert [turn.content for turn in request.chat.messages] == ["Be brief.", "from a pipe"]


def test_json_prints_one_message_a_line(answer, invoke):
    lines = [json.loads(line) for line in invoke("generate", "--json", "hi").stdout.splitlines()]
    assert lines[0]["delta"]["text"] == "Blue "
    assert lines[2]["finished"]["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}


def test_several_models_need_a_choice(gateway, invoke):
    gateway.models += [models_pb2.Model(name="models/a"), models_pb2.Model(name="models/b")]
    with pytest.raises(CommandError, match="choose one of a, b"):
        invoke("generate", "hi")


def test_no_model_says_how_to_make_one(gateway, invoke):
    with pytest.raises(CommandError, match="enginemesh build"):
        invoke("generate", "hi")


def test_refusal_names_field_and_ends_with_status_2(gateway, run_command):
    gateway.error = InvalidFieldError("sampling.top_p", "must be above 0 and up to 1, not 2")
    status, _, err = run_command("generate", "-m", "smol", "--top-p", "2", "hi")
    assert status == 2
    assert err.strip() == (
        "error: invalid argument: sampling.top_p: must be above 0 and up to 1, not 2 "
        "(reason INVALID_FIELD, field sampling.top_p)"
    )


def test_failure_in_mid_stream_keeps_the_text_and_ends_with_status_3(answer, run_command):
    answer.answer.pop()
    answer.error = AttemptsExhaustedError("3 workers failed", tokens_sent=2)
    status, out, err = run_command("generate", "-m", "smol", "hi")
    assert status == 3
    assert out == "Blue ü.\n"
    assert "tokens_sent 2" in err


def test_prompt_that_is_not_utf8_is_refused(answer, invoke):
    with pytest.raises(CommandError, match="not UTF-8"):
        invoke("generate", input=b"\xff")
    assert answer.requests == []
