"""Figures of an answer, and what of it a terminal gets to see."""

from __future__ import annotations

import pytest

from cli import answer as answer_module
from cli.answer import Answer, for_terminal
from enginemesh.v1 import inference_pb2


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(answer_module.time, "monotonic", lambda: now[0])
    return now


def _messages(clock, *times, tokens):
    """Deltas at these times; the last message is the end."""
    for at in times[:-1]:
        clock[0] = at
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x"))
    clock[0] = times[-1]
    usage = inference_pb2.Usage(completion_tokens=tokens)
    yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=usage))


def test_figures_are_those_of_the_client(clock):
    answer = Answer(_messages(clock, 0.5, 1.0, 2.5, tokens=5))
    assert len(list(answer)) == 3
    assert answer.time_to_first_token_s == 0.5
    assert answer.time_per_token_s == 0.5
    assert answer.tokens_per_second == 2.0


def test_one_token_has_no_time_per_token(clock):
    answer = Answer(_messages(clock, 0.5, 0.5, tokens=1))
    list(answer)
    assert answer.time_per_token_s == 0


def test_terminal_gets_no_control_characters():
    assert for_terminal("a\x1b[2Jb\r\x9bc\n\tü🙂") == "a�[2Jb��c\n\tü🙂"
