"""Limits on what waits, and the window in Redis."""

import pytest

from gateway.waiting_room import MAX_RETRY_S, DrainRate, WaitingRoom
from mesh.errors import ExhaustedError
from mesh.model_fields import ServingSettings
from mesh.settings import GatewaySettings
from tests.gateway.helpers import session


def room(**limits):
    return WaitingRoom(GatewaySettings(**{"queue_window": 2, **limits}))


def enter(waiting_room, *names, client="c", now=0.0):
    made = [session(name, client=client) for name in names]
    for one in made:
        waiting_room.enter(one, now)
    return made


def test_the_window_limits_what_is_in_redis_and_refills_as_workers_take():
    r = room()
    a, b, c = enter(r, "a", "b", "c")
    assert r.next_for_redis("m", 0) == [a, b]
    assert r.next_for_redis("m", 0) == []
    r.claimed(a, 1.0)
    assert r.next_for_redis("m", 1) == [c]
    assert r.depth()["m"] == (2, 6)


def test_a_request_that_ends_anywhere_leaves_nothing():
    r = room()
    made = enter(r, "a", "b", "c", "d")
    r.next_for_redis("m", 0)
    r.claimed(made[0], 0.5)
    for one in made:
        r.end(one)
    assert r.depth()["m"] == (0, 0)
    assert r._by_client == {}


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_client_requests": 2}, "max_client_requests"),
        ({"max_queued_requests": 2}, "max_queued_requests"),
        ({"max_queued_tokens": 8}, "max_queued_tokens"),
    ],
)
def test_a_limit_that_is_reached_is_named(limits, name):
    r = room(**limits)
    enter(r, "a", "b")
    with pytest.raises(ExhaustedError, match=name) as caught:
        r.check("m", "c", 3, 0.0)
    assert caught.value.metadata["limit"] == name
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize("name", ["max_waiting_requests", "max_waiting_tokens"])
def test_a_stricter_limit_of_the_model_is_named(name):
    r = room(max_queued_requests=100, max_queued_tokens=100)
    enter(r, "a", "b")
    with pytest.raises(ExhaustedError, match=f"serving.{name}") as caught:
        r.check("m", "c", 3, 0.0, ServingSettings(**{name: 2}))
    assert caught.value.metadata["limit"] == f"serving.{name}"
    r.check("other", "c", 3, 0.0, ServingSettings(**{name: 2}))


def test_a_model_cannot_have_more_than_its_gateway_allows():
    r = room(max_queued_requests=2)
    enter(r, "a", "b")
    with pytest.raises(ExhaustedError, match="max_queued_requests"):
        r.check("m", "c", 3, 0.0, ServingSettings(max_waiting_requests=1000))


def test_another_client_has_limits_of_its_own():
    r = room(max_client_requests=2)
    enter(r, "a", "b")
    r.check("m", "other", 3, 0.0)


def test_a_single_request_over_the_token_limit_is_taken_when_nothing_waits():
    room(max_queued_tokens=2).check("m", "c", 3, 0.0)


def test_what_would_wait_too_long_is_refused_with_the_time_that_the_queue_takes():
    r = room(max_queue_s=1.0)
    made = enter(r, *[str(n) for n in range(100)])
    now = 0.0
    for one in made[:20]:  # three tokens per 0.1 s
        r.next_for_redis("m", now)
        now += 0.1
        r.claimed(one, now)
    with pytest.raises(ExhaustedError, match="max_queue_s") as caught:
        r.check("m", "c", 3, now)
    assert 1.0 < caught.value.retry_after_s < 10
    r = room(max_queue_s=1000.0)
    made = enter(r, *[str(n) for n in range(100)])
    r.next_for_redis("m", 0.0)
    r.claimed(made[0], 0.1)
    r.claimed(made[1], 0.2)
    r.check("m", "c", 3, 0.2)
    with pytest.raises(ExhaustedError, match=r"serving\.max_waiting_s"):
        r.check("m", "c", 3, 0.2, ServingSettings(max_waiting_s=1.0))


def test_neither_quiet_nor_the_start_of_a_worker_counts_as_slowness():
    r = room(max_queue_s=5.0)
    for one in enter(r, *[f"early {n}" for n in range(60)]):
        r.next_for_redis("m", 0.0)
        r.claimed(one, 0.5)
    # Fifteen seconds on, the mean has all but faded, and the worker is gone. A minute later comes another.
    made = enter(r, *[str(n) for n in range(100)], now=15.0)
    r.check("m", "c", 3, 15.0)
    r.next_for_redis("m", 15.0)
    r.check("m", "c", 3, 75.0)
    for one in made[:2]:
        r.claimed(one, 75.0)
    r.check("m", "c", 3, 75.1)


def test_the_oldest_wait_is_of_the_one_that_came_first_and_still_waits():
    r = room()
    (first,) = enter(r, "a", now=1.0)
    made = enter(r, "b", "c", "d", now=2.0)
    assert r.oldest_s("m", 5.0) == 4.0
    assert r.held_back("m") == 4
    r.next_for_redis("m", 5.0)
    assert r.held_back("m") == 2
    r.claimed(first, 5.0)
    assert r.oldest_s("m", 5.0) == 3.0
    for one in [first, *made]:
        r.end(one)
    assert (r.oldest_s("m", 9.0), r.held_back("m")) == (0.0, 0)
    assert (r.oldest_s("unknown", 9.0), r.held_back("unknown")) == (0.0, 0)


def test_the_rate_is_right_from_the_start_and_fades():
    rate = DrainRate()
    assert rate.tokens_per_s(1.0) == 0
    for step in range(1, 21):
        rate.record(30, step * 0.1)
    assert rate.tokens_per_s(2.0) == pytest.approx(300, rel=0.15)
    assert rate.tokens_per_s(100.0) < 1


def test_retry_is_bounded():
    r = room(max_queued_requests=1)
    enter(r, "a")
    r.next_for_redis("m", 0.0)
    (b,) = enter(r, "b", now=0.0)
    r.claimed(b, 0.0)
    with pytest.raises(ExhaustedError) as caught:
        r.check("m", "c", 10**9, 1000.0)
    assert caught.value.retry_after_s <= MAX_RETRY_S
