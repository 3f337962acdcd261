"""The build's own process: what it tells, and that it never outlives its purpose."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import psutil
import pytest
from google.rpc import code_pb2

from build_worker.builder_process import ChildError, run_task
from build_worker.child_messages import BuildTask, FetchTask
from build_worker.stages import Stage
from mesh.errors import BuildError
from mesh.model_file import ModelFile
from mesh.target import detect_cpu
from tests.conditions import until

HUGE_BYTES = 200 << 30
"""A file without content of this size takes minutes to read."""

PARENT = """
import asyncio, sys
from pathlib import Path
from build_worker.builder_process import run_task
from build_worker.child_messages import FetchTask
task = FetchTask(source=sys.argv[1], folder=Path(sys.argv[2]))
asyncio.run(run_task(task, lambda progress: print(progress.fraction, flush=True)))
"""


@pytest.fixture
def huge(tmp_path):
    path = tmp_path / "huge.gguf"
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)
    return path


@pytest.fixture
def fetch_huge(huge, tmp_path):
    return FetchTask(source=str(huge), folder=tmp_path)


@pytest.fixture
def roots(tmp_path):
    return {"ENGINEMESH_SOURCE_ROOTS": str(tmp_path)}


def children():
    return [child for child in psutil.Process().children() if "build_worker.build_child" in child.cmdline()]


async def test_fetch_tells_path_and_digest(tmp_path, roots):
    (tmp_path / "m.gguf").write_bytes(b"weights")
    seen = []

    fetched = await run_task(FetchTask(source="m.gguf", folder=tmp_path), seen.append, roots)

    assert fetched.path == tmp_path / "m.gguf"
    assert len(fetched.digest) == 64
    assert {progress.stage for progress in seen} == {Stage.FETCH}
    assert children() == []


async def test_error_arrives_with_its_status(tmp_path, roots):
    with pytest.raises(ChildError) as caught:
        await run_task(FetchTask(source="absent", folder=tmp_path), print, roots)

    status = caught.value.to_status()
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert status.message.startswith("spec.source: ")
    assert len(status.details) == 2


async def test_unforeseen_error_is_a_failed_build(tmp_path):
    (tmp_path / "engine" / "tokenizer.json").mkdir(parents=True)  # where a file should go
    task = BuildTask(
        spec=ModelFile(model="m", kind="fake"),
        source=tmp_path,
        target=detect_cpu(),
        build_key="0" * 64,
        work=tmp_path,
        output=tmp_path / "engine",
    )

    with pytest.raises(ChildError) as caught:
        await run_task(task, lambda _progress: None)

    assert caught.value.to_status().code == code_pb2.INTERNAL
    assert caught.value.message.startswith("IsADirectoryError: ")


async def test_cancelled_task_leaves_no_process(fetch_huge, roots):
    seen = []
    running = asyncio.ensure_future(run_task(fetch_huge, seen.append, roots))
    await until(lambda: len(seen) > 2)
    assert len(children()) == 1

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert children() == []


async def test_threads_are_limited_by_the_setting(fetch_huge, roots):
    seen = []
    running = asyncio.ensure_future(run_task(fetch_huge, seen.append, {**roots, "ENGINEMESH_THREADS": "1"}))
    await until(lambda: seen)

    assert len(children()[0].cpu_affinity()) == 1

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_killed_process_is_a_failed_build_that_says_so(fetch_huge, roots):
    seen = []
    running = asyncio.ensure_future(run_task(fetch_huge, seen.append, roots))
    await until(lambda: len(seen) > 2)

    children()[0].kill()

    with pytest.raises(BuildError, match="SIGKILL, as when memory runs out"):
        await running


async def test_process_dies_with_its_killed_parent(huge, tmp_path, roots):
    with subprocess.Popen(  # noqa: ASYNC220 - it is over in no time
        [sys.executable, "-c", PARENT, str(huge), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, **roots},
    ) as parent:
        assert parent.stdout.readline()
        (child,) = psutil.Process(parent.pid).children()

        parent.kill()

        await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, limit_s=5.0)
