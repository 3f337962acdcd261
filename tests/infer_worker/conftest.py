"""Gateways driven by hand, fake engines, and a worker around them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from datetime import datetime, timezone

import pytest

from enginemesh.v1 import workers_pb2
from infer_worker.serving import Serving
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.engine_store import EngineRecord, EngineStore
from mesh.manifest import TokenizerInfo
from mesh.object_store import ObjectStore
from mesh.settings import InferWorkerSettings, MeshSettings
from mesh.target import detect_cpu
from tests import engines
from tests.conditions import until
from tests.infer_worker.scripted_gateway import MODEL, ScriptedGateway


@pytest.fixture
async def gateway(redis):
    """A gateway that grants every claim."""
    started = await ScriptedGateway(redis).start()
    yield started
    await started.stop()


def make_fake_engine(
    folder,
    *,
    slots=4,
    max_seq_len=10_000,
    options=None,
    eos_token_ids=(),
    target=None,
    versions=None,
    model=MODEL,
    **script,
):
    """Folder and manifest of a fake engine; other fields are those of its script."""
    files = {"tokenizer.json": b"{}", "script.json": json.dumps({"step_ms": 1, **script}).encode()}
    manifest = engines.manifest(
        files,
        model=model,
        target=target or detect_cpu(),
        versions=versions or {"fake": "1"},
        max_batch_size=slots,
        max_seq_len=max_seq_len,
        options=options or {},
        tokenizer=TokenizerInfo(vocab_size=256, eos_token_ids=eos_token_ids),
    )
    return engines.write(folder / manifest.digest, files), manifest


@pytest.fixture
def worker_settings(valkey, tmp_path):
    """Makes the settings of a worker with short times."""

    def make(**fields) -> InferWorkerSettings:
        defaults = {
            "redis_url": valkey.settings["ENGINEMESH_REDIS_URL"],
            "data_dir": tmp_path / "data",
            "model": MODEL,
            "kinds": "fake",
            "claim_idle_s": 0.3,
            "worker_id": "w1",
        }
        return InferWorkerSettings(**(defaults | fields))

    return make


class RunningServing:
    """A Serving with its run task."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.running = asyncio.ensure_future(serving.run())

    async def close(self, why: str = "the test is over") -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.serving.close(why)


@pytest.fixture
async def serve(redis, tmp_path, worker_settings):
    """Serves a fake engine; fields of its script, and of the settings with `settings`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, settings=None, **engine) -> RunningServing:
            folder, manifest = make_fake_engine(tmp_path, **engine)
            serving = Serving(worker_settings(**(settings or {})), redis, manifest)
            await serving.start(folder)
            running = RunningServing(serving)
            stack.push_async_callback(running.close)
            return running

        yield start


@pytest.fixture
def environment(store_settings, valkey):
    """Environment of a worker process."""
    return {
        **store_settings,
        **valkey.settings,
        "ENGINEMESH_MODEL": MODEL,
        "ENGINEMESH_KINDS": "fake",
        "ENGINEMESH_WORKER_ID": "w1",
        "ENGINEMESH_LEASE_TTL_S": "2",
        "ENGINEMESH_CLAIM_IDLE_S": "0.3",
        "ENGINEMESH_LOG_FORMAT": "json",
    }


@pytest.fixture
def publish(environment, redis, tmp_path, monkeypatch):
    """Publishes a fake engine; fields are those of its script."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = EngineStore(ObjectStore.from_settings(MeshSettings()))

    async def make(before_index=None, **fields):
        folder, manifest = make_fake_engine(tmp_path, **fields)
        await asyncio.to_thread(store.publish, manifest, folder)
        if before_index is not None:
            await asyncio.to_thread(before_index, manifest)
        await EngineIndex(redis).add(EngineRecord(manifest, datetime.now(timezone.utc)))
        return manifest

    return make


@pytest.fixture
async def start(environment, tmp_path):
    """Starts worker processes; fields are environment variables."""
    processes = []

    async def make(**fields) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "infer_worker.main"),
            env={**os.environ, **environment, **fields},
            stderr=(tmp_path / "worker.log").open("ab"),
        )
        processes.append(process)
        return process

    yield make
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Mesh:
    """What the rest of the mesh sees of workers."""

    def __init__(self, redis) -> None:
        self._leases = Leases(redis, WORKER)

    async def worker(self, worker_id: str = "w1") -> workers_pb2.Worker | None:
        info = (await self._leases.live()).get(worker_id)
        return None if info is None else workers_pb2.Worker.FromString(info)

    async def in_state(self, name: str, worker_id: str = "w1") -> workers_pb2.Worker:
        """Waits until a worker says that it is in a state."""
        state = workers_pb2.WorkerState.Value(f"WORKER_STATE_{name}")

        async def is_so() -> bool:
            worker = await self.worker(worker_id)
            return worker is not None and worker.state == state

        await until(is_so)
        return await self.worker(worker_id)


@pytest.fixture
def index(redis):
    return EngineIndex(redis)


@pytest.fixture
def mesh(redis):
    return Mesh(redis)
