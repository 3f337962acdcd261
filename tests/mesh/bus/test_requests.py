"""Requests wait in order, are taken in bites, and are never lost with the worker that took them."""

from __future__ import annotations

import asyncio

import pytest

from mesh.bus import keys
from mesh.bus.requests import RequestConsumer, RequestProducer, Waiting
from tests.conditions import until

MODEL = "m"
ENGINE = "e" * 64
NORMAL = keys.model_stream(MODEL, "normal")


@pytest.fixture
def producer(redis):
    return RequestProducer(redis)


@pytest.fixture
def open_worker(redis):
    async def make(worker_id: str, claim_idle_s: float = 60.0) -> RequestConsumer:
        consumer = RequestConsumer(redis, MODEL, ENGINE, worker_id, claim_idle_s)
        await consumer.open()
        return consumer

    return make


async def payloads(consumer: RequestConsumer, wanted: int = 100, *, claim: bool = False) -> list[bytes]:
    return [entry.payload for entry in await consumer.take(wanted, claim=claim)]


async def is_idle(redis, stream: str, idle_ms: int) -> bool:
    """Whether every pending entry has been idle for this long, by the server's own clock."""
    pending = await redis.xpending_range(stream, keys.REQUEST_GROUP, min="-", max="+", count=100)
    return all(item["time_since_delivered"] >= idle_ms for item in pending)


async def test_take_gives_priorities_in_order_and_nearest_stream_first(producer, open_worker):
    worker = await open_worker("w1")
    for priority in reversed(keys.PRIORITIES):
        for stream in (
            keys.model_stream(MODEL, priority),
            keys.engine_stream(MODEL, ENGINE, priority),
        ):
            await producer.add(stream, stream.encode(), 60)

    assert await payloads(worker) == [
        stream.encode()
        for priority in keys.PRIORITIES
        for stream in (
            keys.engine_stream(MODEL, ENGINE, priority),
            keys.model_stream(MODEL, priority),
        )
    ]


async def test_take_gives_no_more_than_wanted_oldest_first(producer, open_worker):
    worker = await open_worker("w1")
    for number in range(10):
        await producer.add(NORMAL, b"%d" % number, 60)

    assert await payloads(worker, wanted=3) == [b"0", b"1", b"2"]
    assert await payloads(worker, wanted=4) == [b"3", b"4", b"5", b"6"]


async def test_entries_queued_before_the_first_worker_are_taken(producer, open_worker):
    # Field case 28: a group made at `$` would skip it.
    await producer.add(NORMAL, b"early", 60)

    assert await payloads(await open_worker("w1")) == [b"early"]


async def test_entry_goes_to_one_worker_only(producer, open_worker):
    first, second = await open_worker("w1"), await open_worker("w2")
    await producer.add(NORMAL, b"once", 60)

    assert await payloads(first) == [b"once"]
    assert await payloads(second, claim=True) == []


async def test_entries_of_other_engines_and_models_are_left_alone(producer, open_worker):
    worker = await open_worker("w1")
    for stream in (
        keys.engine_stream(MODEL, "f" * 64, "high"),
        keys.model_stream("other", "high"),
    ):
        await producer.add(stream, b"not ours", 60)

    assert await payloads(worker) == []


async def test_acknowledged_entries_leave_nothing_behind(redis, producer, open_worker):
    # Field case 24: acknowledging alone keeps every entry in the stream for ever.
    worker = await open_worker("w1")
    for number in range(200):
        await producer.add(NORMAL, b"%d" % number, 60)
        entries = await worker.take(4, claim=False)
        await worker.acknowledge(entries)
        await worker.acknowledge(entries)  # harmless to repeat

    assert await redis.xlen(NORMAL) == 0
    assert (await redis.xpending(NORMAL, keys.REQUEST_GROUP))["pending"] == 0


async def test_unconfirmed_entry_of_a_silent_worker_is_claimed_by_another(redis, producer, open_worker):
    # Field cases 25 and 27: whoever took it is gone, whatever its name was.
    dead, living = await open_worker("dead"), await open_worker("living", claim_idle_s=0.1)
    await producer.add(NORMAL, b"orphan", 60)
    assert await payloads(dead) == [b"orphan"]

    assert await payloads(living, claim=False) == []
    await until(lambda: is_idle(redis, NORMAL, 100))
    assert await payloads(living, claim=True) == [b"orphan"]


async def test_worker_gets_its_own_entry_again_if_the_answer_was_lost(redis, producer, open_worker):
    worker = await open_worker("w1", claim_idle_s=0.1)
    await producer.add(NORMAL, b"lost answer", 60)
    await redis.xreadgroup(keys.REQUEST_GROUP, "w1", {NORMAL: ">"})
    await until(lambda: is_idle(redis, NORMAL, 100))

    assert await payloads(worker, claim=True) == [b"lost answer"]


async def test_claimed_entries_come_before_new_ones(redis, producer, open_worker):
    dead, living = await open_worker("dead"), await open_worker("living", claim_idle_s=0.1)
    await producer.add(NORMAL, b"old", 60)
    await dead.take(1, claim=False)
    await until(lambda: is_idle(redis, NORMAL, 100))
    await producer.add(NORMAL, b"new", 60)

    assert await payloads(living, wanted=1, claim=True) == [b"old"]


async def test_expired_entry_is_dropped_when_taken(redis, producer, open_worker):
    worker = await open_worker("w1")
    await producer.add(NORMAL, b"late", 0.001)
    await producer.add(NORMAL, b"in time", 60)
    added = (await redis.xrange(NORMAL, count=1))[0][0]
    await until(lambda: _server_is_past(redis, int(added.split(b"-")[0]) + 1))

    assert await payloads(worker, wanted=1) == [b"in time"]
    assert await redis.xlen(NORMAL) == 1


async def test_expired_entry_of_a_dead_worker_is_dropped_when_claimed(redis, producer, open_worker):
    living = await open_worker("living", claim_idle_s=0.1)
    await producer.add(NORMAL, b"late", 0.05)
    # Read past the worker's own check of the deadline: a slow machine must not drop the entry here already.
    await redis.xreadgroup(keys.REQUEST_GROUP, "dead", {NORMAL: ">"})
    await until(lambda: is_idle(redis, NORMAL, 100))

    assert await payloads(living, claim=True) == []
    assert await redis.xlen(NORMAL) == 0


async def test_put_back_entry_goes_to_another_worker_after_those_that_wait(producer, open_worker):
    first, second = await open_worker("w1"), await open_worker("w2")
    for payload in (b"a", b"b"):
        await producer.add(NORMAL, payload, 60)
    entry = (await first.take(1, claim=False))[0]
    await first.put_back(entry)

    assert await payloads(second) == [b"b", b"a"]


async def test_put_back_keeps_the_deadline(redis, producer, open_worker):
    worker = await open_worker("w1")
    ticket = await producer.add(NORMAL, b"a", 60)
    entry = (await worker.take(1, claim=False))[0]
    await until(lambda: _server_is_past(redis, int(ticket.entry_id.split("-")[0]) + 20))
    await worker.put_back(entry)

    entry_id, fields = (await redis.xrange(NORMAL))[0]
    expires = int(entry_id.split(b"-")[0]) + int(fields[b"ttl_ms"])
    # The server reads its clock once for the script and once for the id.
    assert abs(expires - int(ticket.entry_id.split("-")[0]) - 60_000) <= 2


async def test_put_back_of_a_withdrawn_entry_does_nothing(redis, producer, open_worker):
    worker = await open_worker("w1")
    ticket = await producer.add(NORMAL, b"a", 60)
    entry = (await worker.take(1, claim=False))[0]
    await producer.withdraw(ticket)
    await worker.put_back(entry)

    assert await redis.xlen(NORMAL) == 0


async def test_withdrawn_entry_is_not_taken(redis, producer, open_worker):
    worker = await open_worker("w1")
    ticket = await producer.add(NORMAL, b"a", 60)
    assert await producer.present([ticket]) == [True]
    await producer.withdraw(ticket)
    await producer.withdraw(ticket)

    assert await producer.present([ticket]) == [False]
    assert await payloads(worker, claim=True) == []
    assert await redis.xlen(NORMAL) == 0


async def test_withdrawn_entry_that_a_worker_holds_is_not_claimed(redis, producer, open_worker):
    first, second = await open_worker("w1"), await open_worker("w2", claim_idle_s=0.05)
    ticket = await producer.add(NORMAL, b"a", 60)
    await first.take(1, claim=False)
    await producer.withdraw(ticket)

    assert await payloads(second, claim=True) == []
    assert (await redis.xpending(NORMAL, keys.REQUEST_GROUP))["pending"] == 0


async def test_depth_counts_the_model_and_its_engines(producer, open_worker):
    await producer.add(NORMAL, b"a", 60)
    await producer.add(keys.model_stream(MODEL, "low"), b"b", 60)
    await producer.add(keys.engine_stream(MODEL, ENGINE, "high"), b"c", 60)

    assert await producer.depth(MODEL) == 2
    assert await producer.depth(MODEL, [ENGINE]) == 3


async def test_waiting_tells_how_many_and_the_age_of_the_oldest(producer, open_worker):
    assert await producer.waiting(MODEL, [ENGINE]) == Waiting(0, 0.0)
    await producer.add(keys.engine_stream(MODEL, ENGINE, "low"), b"a", 60)
    await until(lambda: _is_older(producer, 0.05))
    await producer.add(NORMAL, b"b", 60)
    waiting = await producer.waiting(MODEL, [ENGINE])
    assert waiting.requests == 2
    assert 0.05 < waiting.oldest_s < 20


async def _is_older(producer, limit_s):
    return (await producer.waiting(MODEL, [ENGINE])).oldest_s > limit_s


async def test_wait_gives_what_comes(producer, open_worker):
    worker = await open_worker("w1")
    waiting = asyncio.ensure_future(worker.wait(5))
    await producer.add(NORMAL, b"a", 60)

    assert [entry.payload for entry in await waiting] == [b"a"]


async def test_wait_ends_empty_after_its_time(open_worker):
    worker = await open_worker("w1")
    assert await worker.wait(0.01) == []


async def test_take_makes_groups_again_after_a_loss_of_data(redis, producer, open_worker):
    worker = await open_worker("w1")
    await redis.flushall()
    await producer.add(NORMAL, b"a", 60)

    assert await payloads(worker) == [b"a"]


async def test_wait_makes_groups_again_after_a_loss_of_data(redis, producer, open_worker):
    worker = await open_worker("w1")
    await redis.flushall()
    await producer.add(NORMAL, b"a", 60)

    assert [entry.payload for entry in await worker.wait(5)] == [b"a"]


async def test_wait_survives_a_loss_of_data_while_it_waits(redis, producer, open_worker):
    worker = await open_worker("w1")
    waiting = asyncio.ensure_future(worker.wait(5))
    await until(lambda: _has_blocked_client(redis))
    await redis.flushall()
    await producer.add(NORMAL, b"a", 60)

    found = [entry.payload for entry in await waiting] or await payloads(worker)
    assert found == [b"a"]


async def test_close_gives_back_what_the_worker_held(redis, producer, open_worker):
    # Field case 26: deleting a consumer drops its pending entries.
    closing, other = await open_worker("w1"), await open_worker("w2")
    for number in range(1500):
        await producer.add(NORMAL, b"%d" % number, 60)
    await closing.take(1500, claim=False)
    await closing.close()

    assert await payloads(other, wanted=2000) == [b"%d" % number for number in range(1500)]
    consumers = await redis.xinfo_consumers(NORMAL, keys.REQUEST_GROUP)
    assert [consumer["name"] for consumer in consumers] == [b"w2"]


async def test_close_after_a_loss_of_data_leaves_nothing(redis, open_worker):
    worker = await open_worker("w1")
    await redis.flushall()
    await worker.close()

    assert await redis.keys("*") == []


async def _server_is_past(redis, unix_ms: int) -> bool:
    seconds, microseconds = await redis.time()
    return seconds * 1000 + microseconds // 1000 > unix_ms


async def _has_blocked_client(redis) -> bool:
    return (await redis.info("clients"))["blocked_clients"] > 0
