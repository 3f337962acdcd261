"""Build jobs and operations on a real server: nothing is lost, run twice by accident, or left behind."""

from __future__ import annotations

import asyncio

import pytest
from google.rpc import code_pb2, status_pb2

from enginemesh.v1 import builds_pb2
from mesh import build_operation
from mesh.bus import keys
from mesh.bus.build_jobs import KEEP_S, STATES_KEPT, BuildConsumer, Hold
from mesh.bus.builds import BuildQueue
from mesh.errors import InvalidFieldError, NotFoundError, PreconditionError
from mesh.target import Target
from tests.conditions import until

TARGET = Target(device_type="cpu", device_name="Test CPU", architecture="x86_64", instruction_set="avx2")
RESULT = builds_pb2.BuildResult(engine="engines/abc", build_key="def", size_bytes=7)


def spec(model="m", kind="fake"):
    return builds_pb2.ModelSpec(model=model, kind=kind)


def consumer(redis, worker_id, *, kinds=("fake",), claim_idle_s=30.0):
    return BuildConsumer(redis, TARGET.key, kinds, worker_id, claim_idle_s)


@pytest.fixture
def queue(redis):
    return BuildQueue(redis)


async def create(queue, **arguments):
    wanted = arguments.pop("spec", spec())
    return await queue.create(wanted, TARGET.to_proto(), **arguments)


def build_id(operation):
    return operation.name.removeprefix("operations/")


def succeeded(taken):
    metadata = builds_pb2.BuildMetadata(spec=taken.job.spec, target=taken.job.target)
    return build_operation.succeeded(taken.job.build_id, metadata, RESULT)


def running(taken, percent):
    metadata = builds_pb2.BuildMetadata(
        spec=taken.job.spec, target=taken.job.target, progress_percent=percent
    )
    return build_operation.unfinished(taken.job.build_id, metadata)


async def test_job_queued_before_first_worker_is_taken(redis, queue):
    operation = await create(queue, trace_context=("00-trace", "state"))

    taken = await consumer(redis, "w1").take(0.01)

    assert f"operations/{taken.job.build_id}" == operation.name
    assert taken.job.spec == spec()
    assert taken.job.target.key == TARGET.key
    assert (taken.job.traceparent, taken.job.tracestate) == ("00-trace", "state")
    assert await consumer(redis, "w2").take(0.01) is None


async def test_new_operation_shows_what_was_asked_for(queue):
    operation = await create(queue)

    metadata = build_operation.metadata_of(operation)
    assert not operation.done
    assert metadata.spec == spec()
    assert metadata.target.key == TARGET.key
    assert metadata.stage == builds_pb2.BUILD_STAGE_QUEUED
    assert metadata.create_time.seconds > 0


async def test_same_request_id_gives_same_operation_also_when_done(redis, queue):
    first = await create(queue, request_id="r1")
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)
    await worker.finish(taken, succeeded(taken))

    again = await create(queue, request_id="r1")

    assert again.name == first.name
    assert again.done
    assert await worker.take(0.01) is None


async def test_request_id_of_another_build_is_refused(queue):
    await create(queue, request_id="r1")

    with pytest.raises(InvalidFieldError, match="request_id"):
        await create(queue, spec=spec("other"), request_id="r1")


async def test_same_build_in_flight_runs_once(redis, queue):
    operations = await asyncio.gather(*(create(queue) for _ in range(20)))

    assert len({operation.name for operation in operations}) == 1
    assert await redis.xlen(keys.build_stream(TARGET.key, "fake")) == 1


async def test_same_build_asked_for_after_the_end_runs_again(redis, queue):
    first = await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)
    await worker.finish(taken, succeeded(taken))

    second = await create(queue)

    assert second.name != first.name


async def test_other_spec_or_target_is_another_build(queue):
    names = {
        (await create(queue)).name,
        (await create(queue, spec=spec("other"))).name,
        (await queue.create(spec(), Target(device_type="cpu", device_name="x").to_proto())).name,
    }

    assert len(names) == 3


async def test_worker_takes_only_its_kinds_and_one_job_at_a_time(redis, queue):
    worker = consumer(redis, "w1", kinds=("fake", "other"))
    await create(queue, spec=spec(kind="third"))
    waiting = asyncio.ensure_future(worker.take(5.0))
    await until(lambda: redis.exists(keys.build_stream(TARGET.key, "other")))

    async with redis.pipeline(transaction=True) as pipe:  # both at one moment, so that one read finds both
        for kind in ("fake", "other"):
            job = builds_pb2.ModelSpec(model="m", kind=kind)
            pipe.xadd(keys.build_stream(TARGET.key, kind), {"build": kind, "job": _job(kind, job)})
        await pipe.execute()

    first = await waiting
    second = await worker.take(1.0)
    assert {first.job.spec.kind, second.job.spec.kind} == {"fake", "other"}
    assert await worker.take(0.01) is None


def _job(identifier, wanted):
    from enginemesh.internal.v1 import queue_pb2

    return queue_pb2.BuildJob(build_id=identifier, spec=wanted, target=TARGET.to_proto()).SerializeToString()


async def test_watch_shows_each_state_until_the_end(redis, queue):
    operation = await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)
    seen = []

    async def watch():
        async for state in queue.watch(build_id(operation)):
            percent = build_operation.metadata_of(state).progress_percent
            seen.append((percent, state.done))

    watching = asyncio.ensure_future(watch())
    await until(lambda: len(seen) == 1)
    await worker.hold(taken, running(taken, 40))
    await until(lambda: len(seen) == 2)
    await worker.finish(taken, succeeded(taken))
    await watching

    assert seen == [(0, False), (40, False), (100, True)]
    assert build_operation.result_of(await queue.get(build_id(operation))) == RESULT


async def test_watch_ends_when_operation_is_lost(redis, queue):
    operation = await create(queue)
    states = queue.watch(build_id(operation))
    await anext(states)
    await redis.flushall()

    with pytest.raises(NotFoundError):
        await anext(states)


async def test_wait_returns_at_its_timeout_and_at_the_end(redis, queue):
    operation = await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)

    assert not (await queue.wait(build_id(operation), 0.05)).done
    waiting = asyncio.ensure_future(queue.wait(build_id(operation), 60.0))
    await worker.finish(taken, succeeded(taken))
    assert (await waiting).done


async def test_log_is_bounded(redis, queue):
    operation = await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)
    for percent in range(STATES_KEPT + 20):
        await worker.hold(taken, running(taken, percent % 100))

    assert await redis.xlen(keys.operation_log(build_id(operation))) == STATES_KEPT


async def test_end_leaves_only_the_log_which_expires(redis, queue):
    operation = await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)
    await queue.cancel(build_id(operation))

    assert await worker.finish(taken, succeeded(taken))
    await worker.close()

    stream, log = keys.build_stream(TARGET.key, "fake"), keys.operation_log(build_id(operation))
    assert set(await redis.keys("*")) == {stream.encode(), log.encode(), keys.BUILDS.encode()}
    assert await redis.xlen(stream) == 0
    assert (await redis.xpending(stream, keys.BUILD_GROUP))["pending"] == 0
    assert await redis.xinfo_consumers(stream, keys.BUILD_GROUP) == []
    assert KEEP_S - 60 < await redis.ttl(log) <= KEEP_S


async def test_job_of_dead_worker_is_claimed_and_its_late_words_are_ignored(redis, queue):
    operation = await create(queue)
    dead, heir = consumer(redis, "dead"), consumer(redis, "heir", claim_idle_s=0.05)
    lost = await dead.take(0.01)

    taken = None
    while taken is None:
        taken = await heir.take(0.05)

    assert taken.job == lost.job
    assert taken.deliveries == 2
    assert await dead.hold(lost, running(lost, 99)) is Hold.LOST
    assert not await dead.finish(lost, succeeded(lost))
    assert not await dead.give_back(lost, running(lost, 0))
    assert not (await queue.get(build_id(operation))).done
    assert await heir.finish(taken, succeeded(taken))


async def test_held_job_is_not_claimed(redis, queue):
    await create(queue)
    owner, other = consumer(redis, "owner"), consumer(redis, "other", claim_idle_s=1.0)
    taken = await owner.take(0.01)
    stream = keys.build_stream(TARGET.key, "fake")

    async def is_idle():
        pending = await redis.xpending_range(stream, keys.BUILD_GROUP, "-", "+", 1)
        return pending[0]["time_since_delivered"] > 600

    for _ in range(2):  # older than the limit in all, but renewed on the way
        await until(is_idle)
        assert await owner.hold(taken) is Hold.HELD
        assert await other.take(0.001) is None


async def test_given_back_job_goes_to_another_worker(redis, queue):
    await create(queue)
    first, second = consumer(redis, "w1"), consumer(redis, "w2")
    taken = await first.take(0.01)

    assert await first.give_back(taken, running(taken, 0))
    await first.close()

    again = await second.take(0.01)
    assert again.job == taken.job
    assert again.deliveries == 1


async def test_close_keeps_a_consumer_that_holds_a_job(redis, queue):
    await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)

    await worker.close()

    assert await worker.hold(taken) is Hold.HELD


async def test_cancelled_before_it_was_taken_ends_at_once(redis, queue):
    operation = await create(queue)

    await queue.cancel(build_id(operation))

    ended = await queue.get(build_id(operation))
    assert ended.done
    assert ended.error.code == code_pb2.CANCELLED
    assert await consumer(redis, "w1").take(0.01) is None


async def test_cancel_asks_the_worker_and_frees_the_way_for_a_new_build(redis, queue):
    operation = await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)
    assert await worker.hold(taken) is Hold.HELD

    await queue.cancel(build_id(operation))

    assert await worker.hold(taken) is Hold.CANCEL_ASKED
    assert not (await queue.get(build_id(operation))).done
    assert (await create(queue)).name != operation.name


async def test_cancel_of_ended_build_changes_nothing(redis, queue):
    operation = await create(queue)
    worker = consumer(redis, "w1")
    taken = await worker.take(0.01)
    await worker.finish(taken, succeeded(taken))

    await queue.cancel(build_id(operation))

    assert (await queue.get(build_id(operation))).WhichOneof("result") == "response"
    assert not await redis.exists(keys.operation_cancel(build_id(operation)))


async def test_delete_forgets_only_ended_builds(redis, queue):
    operation = await create(queue)
    with pytest.raises(PreconditionError, match="cancel it first"):
        await queue.delete(build_id(operation))
    await queue.cancel(build_id(operation))

    await queue.delete(build_id(operation))

    with pytest.raises(NotFoundError):
        await queue.get(build_id(operation))
    with pytest.raises(NotFoundError):
        await queue.delete(build_id(operation))
    assert await queue.ids() == []


async def test_list_is_newest_first_and_drops_what_expired(redis, queue):
    names = [(await create(queue, spec=spec(f"m{number}"))).name for number in range(3)]
    # The ids are random, so builds of one millisecond are in no order: make their times differ.
    for number, name in enumerate(names):
        await redis.zadd(keys.BUILDS, {name.removeprefix("operations/"): number})
    await redis.delete(keys.operation_log(names[1].removeprefix("operations/")))

    ids = await queue.ids()
    states = await queue.states(ids)

    assert [state.name for state in states] == [names[2], names[0]]
    assert len(await queue.ids()) == 2


async def test_unknown_build_is_not_found(queue):
    status = NotFoundError("operation", "operations/none").to_status()
    for call in (queue.get("none"), queue.cancel("none"), queue.delete("none"), queue.wait("none")):
        with pytest.raises(NotFoundError) as caught:
            await call
        assert status_pb2.Status.FromString(caught.value.to_status().SerializeToString()) == status


async def test_malformed_job_is_dropped(redis):
    worker = consumer(redis, "w1")
    stream = keys.build_stream(TARGET.key, "fake")
    await redis.xadd(stream, {"build": "x", "job": b"\xff\xff"})

    assert await worker.take(0.01) is None
    assert await redis.xlen(stream) == 0
    assert (await redis.xpending(stream, keys.BUILD_GROUP))["pending"] == 0


async def test_worker_goes_on_after_redis_lost_its_data(redis, queue):
    worker = consumer(redis, "w1")
    await create(queue)
    lost = await worker.take(0.01)
    await redis.flushall()

    assert await worker.hold(lost) is Hold.LOST
    assert not await worker.finish(lost, succeeded(lost))
    await create(queue)
    assert await worker.take(0.01) is not None
