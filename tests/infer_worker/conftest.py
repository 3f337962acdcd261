"""Gateways driven by hand, fake engines, and a worker around them."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from infer_worker.serving import Serving
from mesh.manifest import TokenizerInfo
from mesh.settings import InferWorkerSettings
from mesh.target import detect_cpu
from tests import engines
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
    **script,
):
    """Folder and manifest of a fake engine; other fields are those of its script."""
    files = {"tokenizer.json": b"{}", "script.json": json.dumps({"step_ms": 1, **script}).encode()}
    manifest = engines.manifest(
        files,
        model=MODEL,
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
