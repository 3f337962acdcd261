"""One request's state: tokens in, deltas out, attempts."""

import asyncio

import pytest

from enginemesh.internal.v1 import step_pb2
from enginemesh.v1 import inference_pb2
from mesh.errors import AttemptsExhaustedError, DeadlineError, UnsupportedError
from tests.gateway.helpers import LENGTH, REFUSED, STOP, session

FINISH_STOP = step_pb2.SequenceFinish(reason=STOP)
FINISH_LENGTH = step_pb2.SequenceFinish(reason=LENGTH)


def test_tokens_that_piled_up_come_out_as_one_delta():
    s = session()
    assert s.accept(0, list(b"ab"), ())
    assert s.accept(2, list(b"c"), ())
    assert s.drain().text == "abc"
    assert s.drain() is None


def test_repeated_tokens_are_taken_once():
    s = session()
    s.accept(0, list(b"abc"), ())
    assert s.accept(1, list(b"bcd"), ())
    assert s.accept(0, list(b"ab"), ())
    assert bytes(s.token_ids) == b"abcd"


def test_a_gap_is_reported_and_takes_nothing():
    s = session()
    assert not s.accept(1, list(b"b"), ())
    assert s.token_ids == []
    assert not s.has_news


def test_offsets_count_from_the_present_attempt():
    s = session()
    s.accept(0, list(b"ab"), ())
    assert s.begin_attempt()
    assert s.accept(0, list(b"c"), ())
    assert bytes(s.token_ids) == b"abc"


def test_length_ends_with_the_text_held_back():
    s = session()
    s.accept(0, "é".encode()[:1], ())
    s.close(FINISH_LENGTH)
    assert s.drain().text == "\ufffd"
    assert s.terminal == inference_pb2.FINISH_REASON_LENGTH


def test_the_stop_token_gives_no_text_but_counts():
    s = session()
    s.accept(0, [*b"ab", 0], ())
    s.close(FINISH_STOP)
    assert s.drain().text == "ab"
    finished = s.finished(1.0)
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert finished.stop_token_id == 0
    assert finished.usage.completion_tokens == 3


def test_a_stop_string_ends_the_answer_before_the_engine_does():
    s = session(stop=["STOP"])
    s.accept(0, list(b"abST"), ())
    assert s.drain().text == "ab"
    s.accept(4, list(b"OPxyz"), ())
    assert s.drain() is None
    assert s.terminal == inference_pb2.FINISH_REASON_STOP
    assert s.finished(1.0).stop_string == "STOP"


def test_a_refusal_names_the_reason():
    s = session()
    s.close(step_pb2.SequenceFinish(reason=REFUSED, error="too long"))
    with pytest.raises(UnsupportedError, match="too long"):
        s.drain()


def test_an_error_comes_after_the_tokens_before_it():
    s = session()
    s.accept(0, list(b"ab"), ())
    s.fail(DeadlineError("late"))
    assert s.drain().text == "ab"
    with pytest.raises(DeadlineError):
        s.drain()


def test_the_last_attempt_that_fails_ends_with_the_tokens_sent():
    s = session(max_attempts=2)
    s.accept(0, list(b"ab"), ())
    s.drain()
    assert s.begin_attempt()
    assert not s.begin_attempt()
    with pytest.raises(AttemptsExhaustedError) as caught:
        s.drain()
    assert caught.value.metadata["tokens_sent"] == "2"


@pytest.mark.parametrize(("tokens", "reason"), [(b"abcdefgh", LENGTH), (b"ab\x00", STOP)])
def test_no_attempt_is_begun_for_an_answer_that_is_complete(tokens, reason):
    s = session(max_tokens=8)
    s.accept(0, list(tokens), ())
    assert not s.begin_attempt()
    assert s.finish.reason == reason
    assert s.error is None


def test_a_moved_request_goes_on_from_its_tokens_with_another_seed():
    s = session(sampling={"seed": 7})
    first = s.queued_request("g", "a:1")
    s.accept(0, list(b"ab"), ())
    s.begin_attempt()
    second = s.queued_request("g", "a:1")
    assert (first.attempt, second.attempt) == (1, 2)
    assert list(second.generated_ids) == list(b"ab")
    assert first.sampling.seed == 7
    assert second.sampling.seed != 7
    assert second.sampling.max_tokens == first.sampling.max_tokens


async def test_wait_returns_at_once_when_there_is_news_and_wakes_when_it_comes():
    loop = asyncio.get_running_loop()
    s = session()
    waiting = asyncio.ensure_future(s.wait(loop))
    await asyncio.sleep(0)
    assert not waiting.done()
    s.accept(0, list(b"a"), ())
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(s.wait(loop), 5)


def test_logprobs_of_other_rows_are_not_passed_on():
    asked, silent = session(sampling={"logprobs": 0}), session()
    for one in (asked, silent):
        one.accept(0, list(b"a"), [inference_pb2.TokenLogprob(token_id=97)])
    assert len(asked.drain().logprobs) == 1
    assert len(silent.drain().logprobs) == 0
