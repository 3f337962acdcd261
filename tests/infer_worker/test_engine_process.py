"""The engine's process, as a real child of a real parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from infer_worker.engine_process import EngineProcess
from mesh.errors import PreconditionError
from tests.conditions import until
from tests.infer_worker.backends.driver import add_command
from tests.infer_worker.conftest import make_fake_engine

PARENT = """
import asyncio, sys
from pathlib import Path
from enginemesh.internal.v1 import engine_process_pb2
from infer_worker.engine_process import EngineProcess
from mesh.manifest import Manifest

async def main(folder, manifest):
    stepped = asyncio.Event()
    engine = EngineProcess(lambda step: stepped.set(), lambda stats: None)
    await engine.start(Path(folder), Manifest.model_validate_json(Path(manifest).read_bytes()))
    engine.add(engine_process_pb2.AddSequence(id=1, prompt_ids=[1]))
    await stepped.wait()
    print(engine.process_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class Listener:
    """What the engine said."""

    def __init__(self) -> None:
        self.steps = []
        self.stats = []
        self.engine = EngineProcess(self.steps.append, self.stats.append)

    def tokens(self, identifier: int) -> list[int]:
        ids = []
        for step in self.steps:
            start = 0
            for row, count in zip(step.ids, step.counts, strict=True):
                if row == identifier:
                    ids += step.token_ids[start : start + count]
                start += count
        return ids

    def finishes(self) -> list[int]:
        return [finish.id for step in self.steps for finish in step.finishes]


@pytest.fixture
async def start(tmp_path):
    """Starts engines; fields are those of the script."""
    listeners = []

    async def make(**fields) -> Listener:
        listener = Listener()
        folder, manifest = make_fake_engine(tmp_path, **fields)
        listener.ready = await listener.engine.start(folder, manifest)
        listeners.append(listener)
        return listener

    yield make
    for listener in listeners:
        await listener.engine.stop()


async def test_ready_tells_limits_and_times(start):
    listener = await start(slots=3, max_seq_len=77, load_ms=20)
    assert (listener.ready.slots, listener.ready.max_seq_len) == (3, 77)
    assert listener.ready.load_us >= 20_000


async def test_steps_come_back_and_statistics_with_them(start):
    listener = await start(slots=3)
    listener.engine.add(add_command(1, [1, 2], max_tokens=5))
    listener.engine.add(add_command(2, [3], max_tokens=3))
    await until(lambda: sorted(listener.finishes()) == [1, 2])
    assert (len(listener.tokens(1)), len(listener.tokens(2))) == (5, 3)
    await until(lambda: listener.stats and listener.stats[-1].running == 0)


async def test_idle_engine_says_nothing_and_uses_no_cpu(start):
    listener = await start()
    listener.engine.add(add_command(1, [1], max_tokens=2))
    await until(lambda: listener.stats and listener.stats[-1].running == 0)
    process = psutil.Process(listener.engine.process_id)
    before, count = process.cpu_times(), len(listener.stats)
    listener.engine.add(add_command(2, [1], max_tokens=2))
    await until(lambda: len(listener.stats) > count and listener.stats[-1].running == 0)
    used = process.cpu_times()
    assert used.user + used.system - before.user - before.system < 0.5


async def test_cancel_stops_within_a_step(start):
    listener = await start(step_ms=20)
    listener.engine.add(add_command(1, [1], max_tokens=10_000))
    await until(lambda: listener.tokens(1))
    listener.engine.cancel(1)
    listener.engine.add(add_command(2, [1], max_tokens=3))
    given = len(listener.tokens(1))
    await until(lambda: listener.finishes() == [2])
    # At most the step that was under way.
    assert len(listener.tokens(1)) <= given + 1


async def test_load_error_is_told_with_its_reason(start):
    with pytest.raises(PreconditionError, match="ValueError: no such luck") as caught:
        await start(load_error="no such luck")
    assert caught.value.reason == "ENGINE_LOAD_FAILED"


async def test_unknown_kind_does_not_load(tmp_path):
    folder, manifest = make_fake_engine(tmp_path)
    engine = EngineProcess(lambda _: None, lambda _: None)
    with pytest.raises(PreconditionError, match="no engine kind 'abacus'"):
        await engine.start(folder, manifest.model_copy(update={"kind": "abacus"}))


async def test_start_that_is_cancelled_leaves_no_process(tmp_path):
    folder, manifest = make_fake_engine(tmp_path, load_ms=60_000)
    engine = EngineProcess(lambda _: None, lambda _: None)
    starting = asyncio.ensure_future(engine.start(folder, manifest))
    await until(lambda: hasattr(engine, "_transport"))
    process = psutil.Process(engine.process_id)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert not process.is_running()


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "signal SIGKILL"), (signal.SIGABRT, "signal SIGABRT")]
)
async def test_killed_engine_is_noticed_at_once(start, number, how):
    listener = await start()
    os.kill(listener.engine.process_id, number)
    assert await asyncio.wait_for(listener.engine.died(), 5) == how


async def test_scripted_death_comes_after_its_tokens(start):
    listener = await start(die_after_tokens=3)
    listener.engine.add(add_command(1, [1], max_tokens=10))
    await asyncio.wait_for(listener.engine.died(), 10)
    assert len(listener.tokens(1)) == 3


async def test_engine_outlives_no_worker_that_stops_in_order(start):
    listener = await start(helpers=1)
    group = _group(listener.engine.process_id)
    assert len(group) == 3  # engine, guard, helper
    await listener.engine.stop()
    await until(lambda: not any(process.is_running() for process in group), limit_s=5)


async def test_hung_engine_is_killed_when_it_does_not_stop(start, monkeypatch):
    monkeypatch.setattr("infer_worker.engine_process.STOP_LIMIT_S", 0.2)
    listener = await start(hang_after_tokens=1, helpers=1)
    group = _group(listener.engine.process_id)
    listener.engine.add(add_command(1, [1], max_tokens=10))
    await until(lambda: listener.tokens(1))
    await listener.engine.stop()
    await until(lambda: not any(process.is_running() for process in group), limit_s=5)


@pytest.mark.parametrize("is_hung", [False, True])
async def test_killed_worker_takes_its_engine_with_it(tmp_path, is_hung):
    # Seen as vLLM 55510: what the engine itself started went on and held the GPU.
    folder, manifest = make_fake_engine(tmp_path, helpers=2, hang_after_tokens=1 if is_hung else 0)
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest.to_bytes())
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(folder), str(path)), stdout=subprocess.PIPE
    )
    group = _group(int(await parent.stdout.readline()))
    assert len(group) == 4  # engine, guard, helpers
    parent.kill()
    await parent.wait()
    await until(lambda: not any(process.is_running() for process in group), limit_s=5)


async def test_engine_pauses_while_its_worker_does_not_read(start):
    listener = await start(step_ms=0)
    transport = listener.engine._transport
    transport.pause_reading()
    listener.engine.add(add_command(1, [1], max_tokens=9000, logprobs=20))
    process = psutil.Process(listener.engine.process_id)
    await until(lambda: process.cpu_times().user > 0.2 and process.status() == psutil.STATUS_SLEEPING)
    transport.resume_reading()
    await until(lambda: listener.finishes() == [1])
    assert len(listener.tokens(1)) == 9000
    assert max(len(step.ids) for step in listener.steps) == 1


def _group(leader: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _group_of(process) == leader]


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0
