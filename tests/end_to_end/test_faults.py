"""A mesh of real processes whose workers and services fail while clients stream.

Gateway and workers have clocks that differ by two minutes, as hosts without time synchronisation may.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from rich.console import Console

from cli.embedded import free_port
from cli.local_mesh import LocalMesh, Plan
from cli.up import build_model, wait_for_models
from mesh.bus.connection import connect
from mesh.model_file import ModelFile
from tests.conditions import until
from tests.end_to_end.streams import Stream, Streams, ready_workers
from tests.faulty_proxy import FaultyProxy

MODEL = ModelFile(model="fake", kind="fake", max_batch_size=64, options={"step_ms": "10"})
WORKERS = 2
CUT_AFTER_BYTES = 600
CLOCKS = Path(__file__).parent.parent / "clocks"
PROMPTS = [f"prompt {number}" for number in range(32)]
LENGTH = 150
# gRPC's core ends calls with CANCELLED that reach a port in the moment in which it closes.
NOT_BEGUN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A mesh with two workers of one fake engine."""
    console = Console(quiet=True)
    plan = Plan(tmp_path_factory.mktemp("mesh"), free_port(), "fake", (MODEL.model,), WORKERS, ())
    environment = {"ENGINEMESH_DRAIN_TIMEOUT_S": "10", "PYTHONPATH": str(CLOCKS)}
    with LocalMesh(plan, console.print, environment=environment) as running:
        build_model(running, MODEL, console)
        wait_for_models(running, plan.models, console)
        yield running


@pytest.fixture
async def streams(mesh):
    """Streams, once both workers are up."""
    await until(lambda: len(ready_workers(mesh)) == WORKERS, 60)
    async with Streams(mesh.address, MODEL.model) as opened:
        yield opened


@pytest.fixture
async def redis(mesh):
    """A connection to the mesh's Redis."""
    client = connect(mesh.environment["ENGINEMESH_REDIS_URL"])
    yield client
    await client.aclose()


async def undisturbed(streams):
    return [stream.tokens for stream in await asyncio.gather(*streams.start(PROMPTS, LENGTH))]


async def under_way(streams):
    """32 streams, each with some tokens."""
    tasks = streams.start(PROMPTS, LENGTH)
    await until(lambda: all(len(stream.tokens) >= 10 for stream in streams.running))
    return tasks


async def nothing_is_left(mesh):
    """Every queue is empty and every slot free."""
    redis = connect(mesh.environment["ENGINEMESH_REDIS_URL"])

    async def is_clean():
        entries = [await redis.xlen(key) async for key in redis.scan_iter(match="em:{m:*", _type="stream")]
        workers = await asyncio.to_thread(ready_workers, mesh)
        return not sum(entries) and len(workers) == WORKERS and not any(w.slots_used for w in workers)

    await until(is_clean, 60)
    await redis.aclose()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda n: n.name)
async def test_losing_a_worker_loses_and_doubles_no_token(mesh, streams, number):
    """Field case 4."""
    expected = await undisturbed(streams)
    tasks = await under_way(streams)
    victim = ready_workers(mesh)[0].process_id
    os.kill(victim, number)
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        if number == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    assert [answer.tokens for answer in answers] == expected
    await nothing_is_left(mesh)


async def test_a_dead_engine_ends_its_worker_and_no_stream(mesh, streams):
    """Field case 8: the worker exits non-zero, so that its supervisor starts another."""
    expected = await undisturbed(streams)
    tasks = await under_way(streams)
    worker = psutil.Process(ready_workers(mesh)[0].process_id)
    (engine,) = worker.children()
    engine.kill()
    assert [answer.tokens for answer in await asyncio.gather(*tasks)] == expected
    await until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    await nothing_is_left(mesh)


async def test_an_engine_dies_with_its_killed_worker(mesh, streams):
    """Field case 9."""
    worker = psutil.Process(ready_workers(mesh)[0].process_id)
    (engine,) = worker.children()
    worker.kill()
    await until(lambda: not engine.is_running(), 5)
    await nothing_is_left(mesh)


async def test_cancelled_requests_free_their_slots_at_once(mesh, streams):
    """Field cases 1 and 6: every cancellation reaches the engine."""
    calls = [streams.stub.Generate(streams.request(prompt, 10_000)) for prompt in PROMPTS]
    for call in calls:
        assert await call.read() is not None
        call.cancel()
    await nothing_is_left(mesh)


async def test_requests_survive_a_redis_that_lost_its_data(mesh, streams, redis):
    expected = await undisturbed(streams)
    tasks = streams.start(PROMPTS, LENGTH)
    await redis.flushall()
    assert [answer.tokens for answer in await asyncio.gather(*tasks)] == expected
    await nothing_is_left(mesh)


async def test_requests_wait_out_a_redis_that_stands_still(mesh, streams, redis):
    expected = await undisturbed(streams)
    running = await under_way(streams)
    await redis.client_pause(5000)
    waiting = streams.start(PROMPTS, LENGTH)
    for tasks in (running, waiting):
        assert [answer.tokens for answer in await asyncio.gather(*tasks)] == expected
    await nothing_is_left(mesh)


async def test_requests_wait_out_a_redis_whose_memory_is_full(mesh, streams, redis):
    expected = await undisturbed(streams)
    running = await under_way(streams)
    await redis.config_set("maxmemory", 1)
    try:
        waiting = streams.start(PROMPTS, LENGTH)
        assert [answer.tokens for answer in await asyncio.gather(*running)] == expected
    finally:
        await redis.config_set("maxmemory", 0)
    assert [answer.tokens for answer in await asyncio.gather(*waiting)] == expected
    await nothing_is_left(mesh)


async def test_requests_survive_a_redis_that_evicts_their_entries(mesh, streams, redis):
    expected = await undisturbed(streams)
    await redis.config_set("maxmemory-policy", "allkeys-random")
    await redis.config_set("maxmemory", 1)
    try:
        tasks = streams.start(PROMPTS, LENGTH)
        await until(lambda: _has_evicted(redis))
    finally:
        await redis.config_set("maxmemory", 0)
        await redis.config_set("maxmemory-policy", "noeviction")
    assert [answer.tokens for answer in await asyncio.gather(*tasks)] == expected
    await nothing_is_left(mesh)


async def _has_evicted(redis):
    return (await redis.info("stats"))["evicted_keys"] > 0


async def test_two_workers_of_one_name_lose_nothing(mesh, streams):
    expected = await undisturbed(streams)
    twins = [start_worker(mesh, ENGINEMESH_WORKER_ID="twin") for _ in range(2)]
    try:
        await until(lambda: any(worker.name == "workers/twin" for worker in ready_workers(mesh)), 60)
        tasks = await under_way(streams)
        twins[0].terminate()  # takes lease and consumer of the other with it
        assert [answer.tokens for answer in await asyncio.gather(*tasks)] == expected
        assert await undisturbed(streams) == expected
    finally:
        for twin in twins:
            twin.terminate()
            await asyncio.to_thread(twin.wait)
    await nothing_is_left(mesh)


async def test_a_worker_starts_over_a_store_that_refuses_stalls_and_cuts(mesh, streams, tmp_path):
    """Its engine is not on its disk."""
    expected = await undisturbed(streams)
    proxy = FaultyProxy(int(mesh.environment["ENGINEMESH_S3_ENDPOINT"].rpartition(":")[2]))
    proxy.refuses = True
    worker = start_worker(
        mesh,
        ENGINEMESH_WORKER_ID="far",
        ENGINEMESH_DATA_DIR=str(tmp_path),
        ENGINEMESH_S3_ENDPOINT=f"127.0.0.1:{proxy.port}",
    )
    try:
        await until(lambda: proxy.refused > 2, 60)
        proxy.stall_after, proxy.refuses = 0, False
        await until(lambda: proxy.is_stalled, 60)
        proxy.cut_after, proxy.cuts_left = CUT_AFTER_BYTES, 3
        proxy.go_on()
        await until(lambda: any(worker.name == "workers/far" for worker in ready_workers(mesh)), 90)
        assert proxy.cuts_left == 0
        assert await undisturbed(streams) == expected
    finally:
        worker.terminate()
        await asyncio.to_thread(worker.wait)
        proxy.close()
    await nothing_is_left(mesh)


def start_worker(mesh, **environment):
    """One more worker of the mesh, which its supervisor knows nothing of."""
    settings = {"ENGINEMESH_KINDS": "fake", "ENGINEMESH_MODEL": MODEL.model, **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "infer_worker.main"],
        env={**os.environ, **mesh.environment, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=mesh.plan.data_dir,
    )


async def test_a_rolling_restart_under_load_loses_nothing(mesh, streams):
    """Every worker, then the gateway, is asked to stop in turn; clients that are told to retry do."""
    expected = dict(zip(PROMPTS, await undisturbed(streams), strict=True))
    is_over = asyncio.Event()
    answered = []

    async def keep_asking(prompt):
        while not is_over.is_set():
            stream = Stream()
            try:
                answer = await streams.run(prompt, LENGTH, stream)
            except grpc.aio.AioRpcError as error:
                if error.code() not in NOT_BEGUN or stream.tokens:
                    raise  # a stream that had begun was cut
                await asyncio.sleep(0.05)
                continue
            assert answer.tokens == expected[prompt]
            answered.append(prompt)

    asking = [asyncio.ensure_future(keep_asking(prompt)) for prompt in PROMPTS[:12]]
    for worker in ready_workers(mesh):
        os.kill(worker.process_id, signal.SIGTERM)
        await until(lambda gone=worker: len(others(mesh, gone)) == WORKERS, 60)
    gateway = mesh.processes["gateway"]
    old = gateway.process_id
    os.kill(old, signal.SIGTERM)
    await until(lambda: gateway.process_id not in (None, old), 60)
    before = len(answered)
    await until(lambda: len(answered) > before + len(asking), 60)
    is_over.set()
    await asyncio.gather(*asking)
    await nothing_is_left(mesh)


def others(mesh, gone):
    """Ready workers but for one that was asked to stop."""
    return [worker for worker in ready_workers(mesh) if worker.process_id != gone.process_id]
