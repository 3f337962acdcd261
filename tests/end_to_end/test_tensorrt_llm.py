"""The whole path to TensorRT-LLM's stand-in, on a host that seems to have an H100.

The library aborts its process there when a file tells it to, as C++ code does that fails.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli.embedded import free_port
from cli.local_import import import_into
from cli.local_mesh import LocalMesh, Plan
from cli.up import wait_for_models
from tests.conditions import until
from tests.end_to_end.streams import Streams, ready_workers
from tests.stand_ins.paths import GPU, TENSORRT_LLM
from tests.stand_ins.tensorrt_llm_engine import export_engine

WORKERS = 2
PROMPTS = [f"prompt {number}" for number in range(12)]
LENGTH = 150


@pytest.fixture(scope="module")
def abort(tmp_path_factory):
    """A file that makes one engine process abort once it exists."""
    return tmp_path_factory.mktemp("abort") / "now"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory, abort):
    """A mesh with two workers of one imported engine."""
    console = Console(quiet=True)
    exported = tmp_path_factory.mktemp("exported") / "engine"
    model = export_engine(exported).model
    data = tmp_path_factory.mktemp("mesh")
    plan = Plan(data, free_port(), "tensorrt_llm", (model,), WORKERS, has_builder=False)
    environment = {
        "PYTHONPATH": f"{TENSORRT_LLM}{os.pathsep}{GPU}",
        "TENSORRT_LLM_STAND_IN_STEP_MS": "10",
        "TENSORRT_LLM_STAND_IN_ABORT": str(abort),
        "ENGINEMESH_LEASE_TTL_S": "4",
    }
    with LocalMesh(plan, console.print, environment=environment) as running:
        import_into(running, exported)
        wait_for_models(running, plan.models, console)
        yield running


@pytest.fixture
async def streams(mesh):
    """Streams, once both workers are up."""
    await until(lambda: len(ready_workers(mesh)) == WORKERS, 60)
    async with Streams(mesh.address, mesh.plan.models[0]) as opened:
        yield opened


async def test_streams_in_a_batch_equal_those_alone(streams):
    alone = await streams.run(PROMPTS[0], LENGTH)
    together = await asyncio.gather(*streams.start(PROMPTS, LENGTH))
    assert len(alone.tokens) == LENGTH
    assert together[0].tokens == alone.tokens
    assert {len(stream.tokens) for stream in together} == {LENGTH}


async def test_process_that_aborts_costs_no_stream(streams, abort):
    undisturbed = await asyncio.gather(*streams.start(PROMPTS, LENGTH))
    running = streams.start(PROMPTS, LENGTH)
    await until(lambda: all(len(stream.tokens) > 20 for stream in streams.running[:4]), 30)
    abort.touch()
    disturbed = await asyncio.gather(*running)
    assert not abort.exists()  # one process has found it, and is gone
    assert [stream.tokens for stream in disturbed] == [stream.tokens for stream in undisturbed]
    assert any(stream.finished.timings.attempts > 1 for stream in disturbed)


async def test_cancelled_stream_frees_its_slot_and_blocks(streams, mesh):
    call = streams.stub.Generate(streams.request(PROMPTS[0], 400), timeout=60)
    async for message in call:
        if message.delta.token_ids:
            break
    await until(lambda: any(worker.slots_used for worker in _workers(mesh)), 20)
    call.cancel()
    await until(lambda: not any(worker.slots_used for worker in _workers(mesh)), 20)
    await until(lambda: all(worker.kv_cache_usage == 0 for worker in _workers(mesh)), 20)


async def test_statistics_reach_the_listing_of_workers(streams, mesh):
    running = streams.start(PROMPTS[:4], 300)
    await until(lambda: any(worker.kv_cache_usage > 0 for worker in _workers(mesh)), 20)
    await asyncio.gather(*running)


def test_chaos_wants_an_engine_of_the_kind(tmp_path):
    program = Path(sys.executable).with_name("enginemesh")
    run = subprocess.run(
        [program, "chaos", "--kind", "tensorrt_llm"], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "give an engine with --engine" in run.stderr
    export_engine(tmp_path / "engine")
    run = subprocess.run(
        [program, "chaos", "--kind", "fake", "--engine", tmp_path / "engine"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "is of kind tensorrt_llm, not fake" in run.stderr


def _workers(mesh):
    with mesh.client() as client:
        return list(client.workers())
