"""The whole life of a worker: in this process, and as the process that users start."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import psutil

from enginemesh.v1 import workers_pb2
from infer_worker.worker import Worker
from mesh.bus import keys
from mesh.settings import MeshSettings
from tests import engines
from tests.conditions import until
from tests.infer_worker.scripted_gateway import MODEL

LONG = {"max_tokens": 9_000}


async def test_worker_says_what_it_is_and_serves(publish, start, gateway, mesh):
    manifest = await publish(slots=3)
    process = await start()
    worker = await mesh.in_state("READY")
    assert worker.name == "workers/w1"
    assert worker.role == workers_pb2.WORKER_ROLE_INFERENCE
    assert (worker.model, worker.engine) == (f"models/{MODEL}", f"engines/{manifest.digest}")
    assert (worker.slots, list(worker.kinds)) == (3, ["fake"])
    assert worker.process_id == process.pid
    assert worker.target.architecture
    assert worker.detail == ""
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 3)

    async def is_busy() -> bool:
        return (await mesh.worker()).slots_used == 1

    await until(is_busy)


async def test_worker_waits_for_an_engine_and_says_why(publish, start, mesh):
    other = engines.TARGET.model_copy(update={"architecture": "sparc"})
    await publish(target=other)
    process = await start()
    worker = await mesh.in_state("WAITING_FOR_ENGINE")
    await until(lambda: _detail_has(mesh, "architecture: engine expects sparc"))
    assert worker.engine == ""
    await publish()
    await mesh.in_state("READY")
    process.terminate()
    assert await process.wait() == 0


async def test_engine_that_does_not_match_is_never_fetched(publish, start, mesh, tmp_path):
    # Seen as tensorrtllm_backend 531: found out only after the download.
    await publish(versions={"fake": "2"})
    await start()
    await until(lambda: _detail_has(mesh, "fake version: engine expects 2, found 1"))
    cache = tmp_path / "data" / "engines"
    assert not [path for path in cache.rglob("*") if path.is_file() and path.name not in {"lock", "waiting"}]


async def test_engine_that_does_not_load_ends_the_worker(publish, start, mesh, tmp_path):
    await publish(load_error="no such luck")
    process = await start()
    assert await asyncio.wait_for(process.wait(), 30) == 1
    assert "no such luck" in (tmp_path / "worker.log").read_text()
    assert await mesh.worker() is None


async def test_unknown_kind_in_the_settings_ends_the_worker(start, redis, tmp_path):
    process = await start(ENGINEMESH_KINDS="fake,abacus")
    assert await asyncio.wait_for(process.wait(), 30) == 1
    assert "no engine kind 'abacus'" in (tmp_path / "worker.log").read_text()


async def test_sigterm_lets_running_requests_end(publish, start, gateway, mesh, redis):
    # Seen as smg 1744: streams were cut.
    await publish(step_ms=10)
    process = await start()
    await gateway.queue("r1", max_tokens=100)
    await gateway.tokens("r1", 5)
    process.terminate()
    await mesh.in_state("DRAINING")
    await gateway.queue("r2")
    answer = await gateway.answer("r1")
    assert (len(answer.ids), answer.reason) == (100, "LENGTH")
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert await mesh.worker() is None
    assert ("r2", 1) not in gateway.answers
    stream = keys.model_stream(MODEL, "normal")
    assert await redis.xlen(stream) == 1
    assert await redis.xinfo_consumers(stream, keys.REQUEST_GROUP) == []


async def test_request_that_outlasts_the_drain_is_handed_over(publish, start, gateway):
    await publish(step_ms=10)
    process = await start(ENGINEMESH_DRAIN_TIMEOUT_S="0.3")
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 5)
    process.terminate()
    answer = await gateway.answer("r1")
    assert (answer.reason, answer.finish.error) == ("ERROR", "the worker is stopping")
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_sigterm_while_it_waits_ends_it_at_once(start, mesh, publish):
    process = await start()
    await mesh.in_state("WAITING_FOR_ENGINE")
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert await mesh.worker() is None


async def test_sigterm_while_it_loads_ends_it_at_once(start, mesh, publish):
    await publish(load_ms=600_000)
    process = await start()
    await mesh.in_state("LOADING")
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_stop_is_heard_in_any_moment_after_getting_ready(publish, worker_settings):
    # It may come while redis-py sends, which can forget a cancellation.
    await publish()
    for number in range(10):
        worker = Worker(worker_settings(**_store_fields(), worker_id=f"w{number}"))
        stop = asyncio.Event()
        _call_when_ready(worker, stop.set, delay_s=number * 0.0003)
        assert await asyncio.wait_for(worker.run(stop), 15) == 0


async def test_dead_engine_ends_the_worker_with_an_error(publish, start, gateway, mesh):
    # Seen as TensorRT-LLM 18663: the server lived on and nothing restarted it.
    await publish()
    process = await start()
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 3)
    (engine,) = [
        child
        for child in psutil.Process(process.pid).children()
        if "engine_child" in " ".join(child.cmdline())
    ]
    engine.kill()
    answer = await gateway.answer("r1")
    assert answer.reason == "ERROR"
    assert "SIGKILL" in answer.finish.error
    assert await asyncio.wait_for(process.wait(), 10) == 1
    assert await mesh.worker() is None


async def test_killed_worker_leaves_no_process(publish, start, mesh):
    await publish(helpers=2)
    process = await start()
    await mesh.in_state("READY")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4  # engine, guard, helpers
    process.kill()
    await until(lambda: not any(child.is_running() for child in family), limit_s=5)


async def test_killed_worker_loses_nothing_that_it_had_not_confirmed(publish, start, gateway, mesh):
    # Seen as dynamo 8182: taken, not started, killed; the client waited for ever.
    await publish()
    gateway.grant = lambda _key: None
    first = await start()
    await gateway.queue("r1")
    await until(lambda: gateway.claims)
    first.kill()
    await first.wait()
    gateway.grant = lambda _key: True
    await start(ENGINEMESH_WORKER_ID="w2")
    assert len((await gateway.answer("r1")).ids) == 5


async def test_running_streams_do_not_notice_that_redis_is_gone(publish, start, gateway, valkey, redis):
    await publish(step_ms=10)
    process = await start()
    await gateway.queue("r1", max_tokens=300)
    await gateway.tokens("r1", 5)
    valkey.process.send_signal(signal.SIGSTOP)
    try:
        answer = await gateway.answer("r1")
    finally:
        valkey.process.send_signal(signal.SIGCONT)
    assert len(answer.ids) == 300
    assert process.returncode is None
    await gateway.queue("r2")
    assert len((await gateway.answer("r2")).ids) == 5


async def test_worker_serves_on_after_redis_lost_its_data(publish, start, gateway, redis, mesh):
    await publish()
    await start()
    await gateway.queue("r1")
    await gateway.answer("r1")
    await redis.flushall()
    await mesh.in_state("READY")
    await gateway.queue("r2")
    assert len((await gateway.answer("r2")).ids) == 5


async def test_cold_start_is_one_trace(publish, mesh, spans, worker_settings):
    await publish()
    settings = worker_settings(**_store_fields())
    stop = asyncio.Event()
    working = asyncio.ensure_future(Worker(settings).run(stop))
    await mesh.in_state("READY")
    stop.set()
    assert await working == 0
    finished = {span.name: span for span in spans.get_finished_spans()}
    names = {
        "worker.cold_start",
        "engine.match",
        "engine.fetch",
        "engine.verify",
        "engine.load",
        "engine.warm_up",
    }
    assert names <= finished.keys()
    assert len({span.context.trace_id for span in finished.values()}) == 1
    root = finished["worker.cold_start"].context.span_id
    for name in ("engine.match", "engine.fetch", "engine.load", "engine.warm_up"):
        assert finished[name].parent.span_id == root


def test_importing_the_worker_loads_no_engine_library():
    program = (
        "import sys; import infer_worker.main;"
        "assert not {'openvino', 'openvino_genai', 'torch', 'numpy'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _call_when_ready(worker: Worker, action, delay_s: float) -> None:
    lease = worker._lease
    changed = lease.changed

    def changed_then(state, detail="") -> None:
        changed(state, detail)
        if state == workers_pb2.WORKER_STATE_READY:
            asyncio.get_running_loop().call_later(delay_s, action)

    lease.changed = changed_then


async def _detail_has(mesh, text: str) -> bool:
    worker = await mesh.worker()
    return worker is not None and text in worker.detail


def _store_fields() -> dict:
    settings = MeshSettings()
    names = ("s3_endpoint", "s3_bucket", "s3_access_key", "s3_secret_key")
    return {name: getattr(settings, name) for name in names}
