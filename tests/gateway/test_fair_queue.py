"""Fair order among clients and priorities."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.fair_queue import AGEING_S, FairQueue
from mesh.bus.keys import PRIORITIES


def filled(*entries, now=0.0):
    queue = FairQueue()
    for item, client, priority, tokens in entries:
        queue.add(item, client=client, priority=priority, tokens=tokens, now=now)
    return queue


def drained(queue, now=0.0):
    order = []
    while (item := queue.pop(now)) is not None:
        order.append(item)
    return order


def test_one_client_is_served_in_order():
    queue = filled(*[(n, "a", "normal", 10) for n in range(5)])
    assert drained(queue) == [0, 1, 2, 3, 4]
    assert (len(queue), queue.tokens) == (0, 0)


def test_priorities_go_first():
    queue = filled(("l", "a", "low", 1), ("n", "a", "normal", 1), ("h", "a", "high", 1))
    assert drained(queue) == ["h", "n", "l"]


def test_a_client_with_one_request_does_not_wait_for_another_with_many():
    many = [(f"a{n}", "a", "normal", 500) for n in range(100)]
    queue = filled(*many, ("b", "b", "normal", 500))
    assert drained(queue).index("b") <= 2


def test_shares_are_of_tokens_not_of_requests():
    long = [(("long", n), "a", "normal", 2000) for n in range(20)]
    short = [(("short", n), "b", "normal", 100) for n in range(400)]
    first = drained(filled(*long, *short))[:220]
    tokens_long = 2000 * sum(kind == "long" for kind, _ in first)
    tokens_short = 100 * sum(kind == "short" for kind, _ in first)
    assert 0.8 < tokens_long / tokens_short < 1.25


def test_a_low_request_is_not_starved_by_high_ones():
    queue = filled(("low", "a", "low", 1))
    now, served = 0.0, []
    while "low" not in served:
        now += 0.5
        queue.add(("high", now), client="b", priority="high", tokens=1, now=now)
        served.append(queue.pop(now))
    assert now <= 3 * AGEING_S


def test_removed_requests_are_not_served():
    queue = filled(("x", "a", "normal", 5), ("y", "a", "normal", 7), ("z", "b", "low", 9))
    assert queue.remove("x")
    assert queue.remove("z")
    assert not queue.remove("x")
    assert queue.tokens == 7
    assert drained(queue) == ["y"]


entry = st.tuples(st.sampled_from("abc"), st.sampled_from(PRIORITIES), st.integers(0, 3000))


@given(st.lists(entry, max_size=40), st.sets(st.integers(0, 39)), st.floats(0, 100))
def test_everything_that_is_not_removed_comes_out_once(entries, removed, now):
    queue = filled(*[(number, *rest) for number, rest in enumerate(entries)])
    gone = {number for number in removed if queue.remove(number)}
    assert sorted(drained(queue, now)) == [n for n in range(len(entries)) if n not in gone]
    assert (len(queue), queue.tokens) == (0, 0)
