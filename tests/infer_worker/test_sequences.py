"""The table of sequences and what it puts into the outboxes of links."""

from __future__ import annotations

import pytest

from enginemesh.internal.v1 import step_pb2
from enginemesh.v1 import inference_pb2
from infer_worker.outbox import FRAME_TOKENS, Outbox
from infer_worker.sequences import SequenceTable

STOP = step_pb2.SEQUENCE_FINISH_REASON_STOP


def step(*rows, finishes=(), logprobs=()):
    """A step of (id, offset, tokens) rows."""
    return step_pb2.StepOutput(
        ids=[row[0] for row in rows],
        offsets=[row[1] for row in rows],
        counts=[len(row[2]) for row in rows],
        token_ids=[token for row in rows for token in row[2]],
        logprobs=logprobs,
        finishes=[step_pb2.SequenceFinish(id=identifier, reason=STOP) for identifier in finishes],
        unix_us=1,
    )


def rows(message):
    """Rows of a frame as (handle, offset, tokens), and the handles that ended."""
    frame, start, found = message.step, 0, []
    for handle, offset, count in zip(frame.ids, frame.offsets, frame.counts, strict=True):
        found.append((handle, offset, list(frame.token_ids[start : start + count])))
        start += count
    return found, [finish.id for finish in frame.finishes]


@pytest.fixture
def table():
    return SequenceTable("m")


@pytest.fixture
def outbox():
    return Outbox()


def start(table, outbox, *, with_logprobs=False):
    return table.start(outbox, None, with_logprobs=with_logprobs)


def test_step_is_split_by_link(table):
    first, second = Outbox(), Outbox()
    start(table, first)
    start(table, second)
    start(table, first)
    table.take_step(step((1, 0, [10]), (2, 0, [20, 21]), (3, 0, [30])))
    assert rows(first.take()) == ([(1, 0, [10]), (3, 0, [30])], [])
    assert rows(second.take()) == ([(2, 0, [20, 21])], [])
    assert first.take() is None


def test_steps_that_were_not_taken_yet_merge_into_one_row(table, outbox):
    start(table, outbox)
    table.take_step(step((1, 0, [10])))
    table.take_step(step((1, 1, [11, 12])))
    assert rows(outbox.take()) == ([(1, 0, [10, 11, 12])], [])
    table.take_step(step((1, 3, [13])))
    assert rows(outbox.take()) == ([(1, 3, [13])], [])


def test_ended_sequence_leaves_the_table_and_tells_its_end_last(table, outbox):
    start(table, outbox)
    table.take_step(step((1, 0, [10]), finishes=[1]))
    assert len(table) == 0
    assert rows(outbox.take()) == ([(1, 0, [10])], [1])
    assert not outbox


def test_end_without_tokens_needs_no_row(table, outbox):
    start(table, outbox)
    table.take_step(step(finishes=[1]))
    assert rows(outbox.take()) == ([], [1])


def test_rows_of_unknown_sequences_are_dropped(table, outbox):
    start(table, outbox)
    table.take_step(step((99, 0, [1, 2]), (1, 0, [10]), finishes=[99]))
    assert rows(outbox.take()) == ([(1, 0, [10])], [])


def test_cancelled_sequence_is_forgotten_with_its_unsent_tokens(table, outbox):
    start(table, outbox)
    table.take_step(step((1, 0, [10])))
    assert table.cancel(outbox, 1)
    assert not table.cancel(outbox, 1)
    assert len(table) == 0
    assert outbox.take() is None


def test_lost_link_gives_up_its_own_sequences_only(table, outbox):
    other = Outbox()
    start(table, outbox)
    start(table, other)
    start(table, outbox)
    assert table.cancel_all(outbox) == [1, 3]
    assert table.cancel_all(outbox) == []
    assert len(table) == 1


def test_tokens_are_sent_again_from_where_the_gateway_asks(table, outbox):
    start(table, outbox)
    table.take_step(step((1, 0, [10, 11, 12])))
    outbox.take()
    table.send_again(outbox, 1, 1)
    assert rows(outbox.take()) == ([(1, 1, [11, 12])], [])


def test_tokens_of_an_ended_sequence_cannot_be_sent_again_and_it_fails(table, outbox):
    table.send_again(outbox, 7, 1)
    frame = outbox.take().step
    assert frame.finishes[0].id == 7
    assert frame.finishes[0].reason == step_pb2.SEQUENCE_FINISH_REASON_ERROR


def test_failing_all_tells_every_gateway_what_came_before(table, outbox):
    other = Outbox()
    start(table, outbox)
    start(table, other)
    table.take_step(step((1, 0, [10])))
    assert len(table.fail_all("the engine died")) == 2
    frame = outbox.take().step
    assert list(frame.token_ids) == [10]
    assert frame.finishes[0].error == "the engine died"
    assert rows(other.take()) == ([], [2])
    assert len(table) == 0


def test_logprobs_go_with_their_tokens(table, outbox):
    start(table, outbox, with_logprobs=True)
    start(table, outbox)
    logprobs = [inference_pb2.TokenLogprob(token_id=token, logprob=-1) for token in (10, 0)]
    table.take_step(step((1, 0, [10]), (2, 0, [20]), logprobs=logprobs))
    frame = outbox.take().step
    assert [logprob.token_id for logprob in frame.logprobs] == [10, 0]


def test_frame_has_a_limit_and_the_rest_follows(table, outbox):
    start(table, outbox)
    tokens = list(range(FRAME_TOKENS + 5))
    table.take_step(step((1, 0, tokens), finishes=[1]))
    (first,), ends = rows(outbox.take())
    assert (first, ends) == ((1, 0, tokens[:FRAME_TOKENS]), [])
    assert rows(outbox.take()) == ([(1, FRAME_TOKENS, tokens[FRAME_TOKENS:])], [1])


def test_claims_go_before_frames(table, outbox):
    start(table, outbox)
    table.take_step(step((1, 0, [10])))
    outbox.claim("r1", 1, 1)
    outbox.claim("r2", 3, 2)
    claims = outbox.take().claims.claims
    assert [(claim.request_id, claim.attempt, claim.handle) for claim in claims] == [
        ("r1", 1, 1),
        ("r2", 3, 2),
    ]
    assert outbox.take().HasField("step")


def test_ids_are_never_used_twice(table, outbox):
    ids = set()
    for _ in range(19):
        fresh = start(table, outbox).id
        ids.add(fresh)
        table.cancel(outbox, fresh)
    assert len(ids) == 19
