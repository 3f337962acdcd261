"""Build workers on a real Valkey and S3, in this process and in processes of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from build_worker.worker import BuildWorker
from enginemesh.v1 import builds_pb2
from mesh.bus.builds import BuildQueue
from mesh.engine_store import EngineStore
from mesh.object_store import ObjectStore
from mesh.settings import BuildWorkerSettings
from mesh.target import detect_cpu


@pytest.fixture
def environment(redis, valkey, store_settings, tmp_path, monkeypatch):
    """Settings of a worker of kind fake, also as environment; its source folder is `tmp_path`."""
    values = {
        **valkey.settings,
        **store_settings,
        "ENGINEMESH_KINDS": "fake",
        "ENGINEMESH_SOURCE_ROOTS": str(tmp_path),
        "ENGINEMESH_LEASE_TTL_S": "1.5",
        "ENGINEMESH_DRAIN_TIMEOUT_S": "0.2",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
async def run_worker(environment):
    """Starts build workers in this process."""
    stop = asyncio.Event()
    running = []

    def start(worker_id="b1", target=None, **settings):
        made = BuildWorker(BuildWorkerSettings(worker_id=worker_id, **settings), target or detect_cpu())
        running.append(asyncio.ensure_future(made.run(stop)))
        return running[-1]

    yield start
    stop.set()
    await asyncio.gather(*running)


@pytest.fixture
async def worker(run_worker):
    """A build worker in this process."""
    return run_worker()


@pytest.fixture
def start_worker(environment, tmp_path):
    """Starts build workers in processes of their own."""
    started = []

    def start(worker_id, **more):
        process = subprocess.Popen(
            [sys.executable, "-m", "build_worker.main"],
            env={**os.environ, **environment, "ENGINEMESH_WORKER_ID": worker_id, **more},
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def queue(redis):
    return BuildQueue(redis)


@pytest.fixture
def store(environment):
    return EngineStore(ObjectStore.from_settings(BuildWorkerSettings()))


@pytest.fixture
def builds_folder(environment, tmp_path):
    return tmp_path / "data" / "builds"


@pytest.fixture
def create(queue):
    """Queues a build of model m and kind fake for this CPU; returns its id."""

    async def call(trace_context=("", ""), target=None, on=queue, **fields):
        spec = builds_pb2.ModelSpec(**{"model": "m", "kind": "fake", **fields})
        operation = await on.create(spec, (target or detect_cpu()).to_proto(), trace_context=trace_context)
        return operation.name.removeprefix("operations/")

    return call
