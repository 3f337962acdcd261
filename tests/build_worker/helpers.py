"""Runs build tasks in their process, as a worker does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from build_worker.backends import load_builder
from build_worker.backends.base import BuildInput
from build_worker.builder_process import run_task
from build_worker.child_messages import BuildTask
from build_worker.engine_folder import make_manifest
from enginemesh.v1 import workers_pb2
from mesh.bus.leases import WORKER, Leases
from mesh.target import detect_cpu
from tests.conditions import until

if TYPE_CHECKING:
    from mesh.manifest import Manifest

KEY = "0" * 64


async def build(folder, spec, source, on_progress=lambda _progress: None) -> Manifest:
    """The manifest of the engine that is built in `folder`/engine."""
    work, output = folder / "work", folder / "engine"
    for path in (work, output):
        path.mkdir(parents=True)
    task = BuildTask(spec=spec, source=source, target=detect_cpu(), build_key=KEY, work=work, output=output)
    return (await run_task(task, on_progress)).manifest


def build_now(*arguments) -> Manifest:
    """Like build, for tests and fixtures that don't run in an event loop."""
    return asyncio.run(build(*arguments))


def build_here(folder, spec, source, more_sources=None) -> Manifest:
    """Like build_now, in this process and so in less time; `more_sources` are by dotted field."""
    work, output = folder / "work", folder / "engine"
    for path in (work, output):
        path.mkdir(parents=True)
    builder, target = load_builder(spec.kind), detect_cpu()
    job = BuildInput(spec, source, target, work, output, more_sources or {})
    traits = builder.build(job, lambda *_: None)
    versions = builder.runtime_versions()
    return make_manifest(output, spec, target, build_key=KEY, versions=versions, traits=traits)


async def until_ready(redis, worker_id):
    """Waits until a worker says that it takes jobs."""

    async def is_ready():
        info = (await Leases(redis, WORKER).live()).get(worker_id)
        return info and workers_pb2.Worker.FromString(info).state == workers_pb2.WORKER_STATE_READY

    await until(is_ready)
