"""The protocol's core."""

import pytest

from gateway.request_table import LinkSessions, RequestTable
from gateway.session import State
from mesh.bus.requests import Ticket
from mesh.errors import AlreadyExistsError, DeadlineError
from tests.gateway.helpers import ERROR, LENGTH, session, step


@pytest.fixture
def table():
    return RequestTable()


@pytest.fixture
def link():
    return LinkSessions("w1", "e1")


def running(table, link, request_id="r", handle=1):
    s = session(request_id)
    table.add(s)
    assert table.claim(link, request_id, 1, handle) is s
    return s


def test_the_first_worker_to_claim_wins(table, link):
    s = session()
    table.add(s)
    other = LinkSessions("w2", "e1")
    assert table.claim(link, "r", 1, 7) is s
    assert table.claim(other, "r", 1, 7) is None
    assert table.claim(link, "r", 1, 8) is None
    assert (s.worker_id, s.handle) == ("w1", 7)


@pytest.mark.parametrize("claim", [("r", 2), ("unknown", 1)])
def test_a_claim_of_what_is_not_queued_is_refused(table, link, claim):
    table.add(session())
    assert table.claim(link, *claim, 1) is None


def test_a_name_in_flight_cannot_be_used_again(table):
    table.add(session())
    with pytest.raises(AlreadyExistsError):
        table.add(session())


def test_a_frame_reaches_each_of_its_requests(table, link):
    a, b = running(table, link, "a", 1), running(table, link, "b", 2)
    result = table.take_step(link, step((1, 0, [*b"xy"]), (2, 0, [*b"z"])))
    assert (bytes(a.token_ids), bytes(b.token_ids)) == (b"xy", b"z")
    assert result.first_tokens == [a, b]
    assert table.take_step(link, step((1, 2, [*b"q"]))).first_tokens == []


def test_rows_of_ended_requests_are_ignored(table, link):
    s = running(table, link)
    table.end(s)
    table.take_step(link, step((1, 0, [*b"x"]), finishes=[(1, LENGTH)]))
    assert s.token_ids == []
    assert s.finish is None


def test_a_gap_is_asked_for_again_and_its_finish_waits(table, link):
    s = running(table, link)
    result = table.take_step(link, step((1, 2, [*b"c"]), finishes=[(1, LENGTH)]))
    assert result.gaps == [s]
    assert s.finish is None
    table.take_step(link, step((1, 0, [*b"abc"]), finishes=[(1, LENGTH)]))
    assert bytes(s.token_ids) == b"abc"
    assert s.finish is not None


def test_an_engine_error_moves_only_its_request(table, link):
    a, b = running(table, link, "a", 1), running(table, link, "b", 2)
    result = table.take_step(link, step(finishes=[(1, ERROR)]))
    assert result.failed == [a]
    assert table.next_attempt(a)
    assert (a.state, b.state) == (State.QUEUED, State.RUNNING)


def test_a_lost_link_moves_all_its_requests_once(table, link):
    a, b = running(table, link, "a", 1), running(table, link, "b", 2)
    assert table.lose(link) == [a, b]
    assert table.lose(link) == []
    assert {a.attempt, b.attempt} == {2}
    assert table.claim(LinkSessions("w2", "e1"), "a", 1, 1) is None
    assert table.claim(LinkSessions("w2", "e1"), "a", 2, 1) is a


def test_frames_of_a_lost_link_change_nothing(table, link):
    s = running(table, link)
    table.lose(link)
    table.take_step(link, step((1, 0, [*b"late"])))
    assert s.token_ids == []


def test_ending_a_queued_request_gives_back_its_entry(table):
    s = session()
    table.add(s)
    s.ticket = Ticket("stream", "1-0")
    assert table.end(s).ticket == Ticket("stream", "1-0")
    assert table.end(s).ticket is None
    assert len(table) == 0


def test_ending_a_running_request_names_its_sequence(table, link):
    s = running(table, link)
    leftover = table.end(s)
    assert (leftover.link, leftover.handle, leftover.ticket) == (link, 1, None)
    assert link.by_handle == {}


def test_ending_a_finished_request_leaves_nothing(table, link):
    s = running(table, link)
    table.take_step(link, step((1, 0, [*b"x"]), finishes=[(1, LENGTH)]))
    leftover = table.end(s)
    assert (leftover.link, leftover.ticket) == (None, None)


def test_a_refused_name_leaves_the_request_that_has_it(table, link):
    first, second = session(), session()
    table.add(first)
    with pytest.raises(AlreadyExistsError):
        table.add(second)
    table.end(second)
    assert table.claim(link, "r", 1, 1) is first
    assert len(table) == 1


def test_an_engine_that_cannot_run_a_request_does_not_get_it(table):
    s = session()
    table.add(s)
    stranger = LinkSessions("w3", "other engine")
    assert table.claim(stranger, "r", 1, 1) is None
    assert table.misplaced(stranger, "r", 1) is s
    assert table.misplaced(stranger, "r", 2) is None
    assert s.state is State.QUEUED


def test_a_request_that_failed_is_not_moved(table, link):
    s = running(table, link)
    s.fail(DeadlineError("late"))
    assert table.lose(link) == []
