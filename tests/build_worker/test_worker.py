"""Build workers on real servers: builds end, once, and leave nothing half made."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest
from google.rpc import code_pb2, error_details_pb2
from opentelemetry import trace

from build_worker.worker import BuildWorker
from cli.embedded import start_valkey
from enginemesh.v1 import builds_pb2, workers_pb2
from mesh import build_operation, telemetry
from mesh.bus import keys
from mesh.bus.build_jobs import BuildConsumer
from mesh.bus.builds import BuildQueue
from mesh.bus.connection import connect
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.engine_store import EngineStore
from mesh.errors import UnavailableError
from mesh.settings import BuildWorkerSettings
from mesh.target import detect_cpu
from tests.conditions import until

HUGE_BYTES = 200 << 30
"""A file without content of this size takes minutes to read."""

STAGES = ["fetch", "convert", "quantise", "compile", "publish"]


@pytest.fixture
def huge(tmp_path):
    path = tmp_path / "huge.gguf"
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)
    return path


async def until_it_reads(queue, build_id):
    """Waits until the build's process reads its source."""

    async def reads():
        metadata = build_operation.metadata_of(await queue.get(build_id))
        return metadata.detail == "reading weights"

    await until(reads)


def children(process_id=None):
    found = psutil.Process(process_id).children()
    return [child for child in found if "build_worker.build_child" in child.cmdline()]


@pytest.mark.usefixtures("worker")
async def test_built_engine_is_in_store_and_index(create, queue, redis, store, builds_folder):
    ended = await queue.wait(await create())

    result = build_operation.result_of(ended)
    record = store.record(result.engine.removeprefix("engines/"))
    assert not result.cached
    assert result.size_bytes == record.manifest.size
    assert store.find_build(result.build_key) == record.digest
    assert record.manifest.target == detect_cpu()
    assert await EngineIndex(redis).engines("m") == [record]
    assert store.read_file(record.manifest, "script.json", 100) == b"{}"
    assert list(builds_folder.iterdir()) == []
    assert await redis.xlen(keys.build_stream(detect_cpu().key, "fake")) == 0


async def test_same_build_again_is_answered_from_the_store(create, worker, queue, redis):
    first = build_operation.result_of(await queue.wait(await create()))
    await redis.delete(keys.model_engines("m"))  # the index may have been lost; the store was not

    again = build_operation.result_of(await queue.wait(await create()))

    assert again.cached
    assert again.engine == first.engine
    assert len(await EngineIndex(redis).engines("m")) == 1


async def test_states_go_forward_through_all_stages(create, worker, queue):
    seen = [build_operation.metadata_of(state) async for state in queue.watch(await create())]

    percents = [metadata.progress_percent for metadata in seen]
    stages = [metadata.stage for metadata in seen]
    assert stages == sorted(stages)
    assert percents == sorted(percents)
    assert (stages[0], stages[-1]) == (builds_pb2.BUILD_STAGE_QUEUED, builds_pb2.BUILD_STAGE_DONE)
    assert percents[-1] == 100
    assert seen[-1].worker == "workers/b1"
    assert seen[-1].create_time == seen[0].create_time


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"precision": "int8"}, code_pb2.INVALID_ARGUMENT, "spec.precision"),
        ({"source": "absent"}, code_pb2.INVALID_ARGUMENT, "spec.source"),
        ({"options": {"slots": "x"}}, code_pb2.INVALID_ARGUMENT, "spec.options.slots"),
    ],
)
@pytest.mark.usefixtures("worker")
async def test_build_that_cannot_be_done_ends_with_a_typed_error(create, queue, fields, code, words):
    ended = await queue.wait(await create(**fields))

    assert ended.error.code == code
    assert ended.error.message.startswith(words)
    assert ended.error.details[0].Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
    assert build_operation.metadata_of(ended).stage == builds_pb2.BUILD_STAGE_DONE


async def test_unreachable_store_fails_the_build_and_not_the_worker(
    create, worker, queue, monkeypatch, store
):
    monkeypatch.setattr(EngineStore, "find_build", _unavailable)
    failed = await queue.wait(await create())
    monkeypatch.undo()

    assert failed.error.code == code_pb2.UNAVAILABLE
    assert build_operation.result_of(await queue.wait(await create())).engine


def _unavailable(_store, _key):
    raise UnavailableError("the store is away", 1.0)


@pytest.mark.usefixtures("worker")
async def test_cancelled_build_leaves_nothing_and_the_worker_goes_on(create, queue, huge, builds_folder):
    build_id = await create(source=str(huge))
    await until_it_reads(queue, build_id)
    assert len(children()) == 1

    await queue.cancel(build_id)
    ended = await queue.wait(build_id)

    assert ended.error.code == code_pb2.CANCELLED
    assert ended.error.message == "cancelled in stage fetch"
    assert children() == []
    assert list(builds_folder.iterdir()) == []
    assert build_operation.result_of(await queue.wait(await create())).engine


async def test_lease_says_what_the_worker_is_and_does(create, worker, queue, redis, huge):
    leases = Leases(redis, WORKER)

    async def described():
        info = (await leases.live()).get("b1")
        return workers_pb2.Worker.FromString(info) if info else workers_pb2.Worker()

    async def is_idle():
        return (await described()).state == workers_pb2.WORKER_STATE_READY

    async def is_busy():
        return (await described()).slots_used == 1

    await until(is_idle)
    idle = await described()
    build_id = await create(source=str(huge))
    await until(is_busy)
    await queue.cancel(build_id)

    assert idle.name == "workers/b1"
    assert idle.role == workers_pb2.WORKER_ROLE_BUILD
    assert list(idle.kinds) == ["fake"]
    assert idle.target.key == detect_cpu().key


async def test_one_build_is_one_trace_without_gaps(create, worker, queue, spans):
    with trace.get_tracer("test").start_as_current_span("call") as call:
        context = telemetry.inject()
    build_id = await create(context)
    await queue.wait(build_id)
    await until(lambda: any(span.name == "build" for span in spans.get_finished_spans()))

    found = {span.name: span for span in spans.get_finished_spans()}
    build = found["build"]
    stages = [found[name] for name in STAGES]
    assert build.kind == trace.SpanKind.CONSUMER
    assert build.parent.span_id == call.get_span_context().span_id
    assert build.attributes["enginemesh.build"] == build_id
    assert {stage.parent.span_id for stage in stages} == {build.context.span_id}
    assert {span.context.trace_id for span in (build, *stages)} == {call.get_span_context().trace_id}
    covered = sum(stage.end_time - stage.start_time for stage in stages)
    assert covered > 0.8 * (build.end_time - build.start_time)


async def test_failed_stage_says_so_in_the_trace(create, worker, queue, spans):
    await queue.wait(await create(source="absent"))
    await until(lambda: any(span.name == "build" for span in spans.get_finished_spans()))

    found = {span.name: span for span in spans.get_finished_spans()}
    assert not found["fetch"].status.is_ok
    assert not found["build"].status.is_ok
    assert found["build"].attributes["error.type"] == "ChildError"
    assert "convert" not in found


async def test_sigterm_gives_a_long_build_back_to_the_next_worker(create, start_worker, queue, redis, huge):
    first = start_worker("first")
    build_id = await create(source=str(huge))
    await until_it_reads(queue, build_id)
    children_of_first = children(first.pid)

    first.send_signal(signal.SIGTERM)
    await asyncio.to_thread(first.wait)
    given_back = build_operation.metadata_of(await queue.get(build_id))
    huge.write_bytes(b"")  # short enough now to end
    start_worker("second")
    ended = await queue.wait(build_id)

    assert first.returncode == 0
    assert given_back.stage == builds_pb2.BUILD_STAGE_QUEUED
    assert not given_back.worker
    assert not any(child.is_running() for child in children_of_first)
    assert build_operation.result_of(ended).engine
    assert build_operation.metadata_of(ended).worker == "workers/second"
    assert "first" not in await Leases(redis, WORKER).live()


async def test_build_goes_on_while_redis_restarts(create, environment, tmp_path, monkeypatch, huge):
    own = start_valkey(tmp_path / "valkey")
    monkeypatch.setenv("ENGINEMESH_REDIS_URL", own.settings["ENGINEMESH_REDIS_URL"])
    settings = BuildWorkerSettings(worker_id="b1")
    stop = asyncio.Event()
    running = asyncio.ensure_future(BuildWorker(settings, detect_cpu()).run(stop))
    client = connect(settings.redis_url)
    queue = BuildQueue(client)
    build_id = await create(on=queue, source=str(huge))
    await until_it_reads(queue, build_id)
    (child,) = children()

    await asyncio.to_thread(own.stop)
    port = int(settings.redis_url.rpartition(":")[2].partition("/")[0])
    own = await asyncio.to_thread(start_valkey, tmp_path / "valkey", port)
    before = build_operation.metadata_of(await queue.get(build_id)).update_time

    async def has_news():
        return build_operation.metadata_of(await queue.get(build_id)).update_time != before

    await until(has_news)
    assert child.is_running()
    await queue.cancel(build_id)
    assert (await queue.wait(build_id)).error.code == code_pb2.CANCELLED
    stop.set()
    await running
    await client.aclose()
    own.stop()


async def test_build_that_takes_its_workers_down_is_given_up(create, redis, environment, queue):
    build_id = await create()
    for name in ("dead-1", "dead-2", "dead-3"):
        victim = BuildConsumer(redis, detect_cpu().key, ["fake"], name, claim_idle_s=0.0)
        assert await victim.take(0.01) is not None

    stop = asyncio.Event()
    running = asyncio.ensure_future(BuildWorker(BuildWorkerSettings(worker_id="b1"), detect_cpu()).run(stop))
    ended = await queue.wait(build_id)
    stop.set()
    await running

    assert ended.error.message == "3 build workers died over this build"


async def test_unknown_kind_is_refused_at_the_start(environment, monkeypatch, start_worker):
    environment["ENGINEMESH_KINDS"] = "fake,abacus"

    process = start_worker("b1")

    assert await asyncio.to_thread(process.wait) != 0
