"""SmolLM2 on a real OpenVINO engine, through every process of a mesh."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid

import pytest
from rich.console import Console

from cli import spans
from cli.embedded import free_port
from cli.local_mesh import LocalMesh, Plan
from cli.up import wait_for_models
from mesh.bus.connection import connect
from mesh.bus.index import EngineIndex, rebuild_index
from mesh.engine_store import EngineStore
from mesh.object_store import ObjectStore
from mesh.settings import MeshSettings
from tests.conditions import until
from tests.end_to_end.streams import Streams, ready_workers

pytestmark = [pytest.mark.openvino, pytest.mark.timeout(600)]

WORDS = "sea sky king road tree bird song rain moon gate lamp ship wind door coin hill"
PROMPTS = [f"The {word} of the" for word in WORDS.split()]
PROMPT = "Once upon a time"
LENGTH = 24
WORKERS = 2


@pytest.fixture(scope="module")
def mesh(tmp_path_factory, smollm2_engine):
    """A mesh with two workers of the sample engine, whose store has it already."""
    console = Console(quiet=True)
    model = smollm2_engine.manifest.model
    plan = Plan(tmp_path_factory.mktemp("mesh"), free_port(), "openvino", (model,), WORKERS, ())
    with LocalMesh(plan, console.print) as running:
        asyncio.run(publish(running, smollm2_engine))
        wait_for_models(running, plan.models, console)
        yield running


async def publish(mesh, engine):
    """Puts an engine that lies on the disk into the mesh's store and index."""
    settings = MeshSettings(
        **{name.removeprefix("ENGINEMESH_").lower(): value for name, value in mesh.environment.items()}
    )
    store = EngineStore(ObjectStore.from_settings(settings))
    await asyncio.to_thread(store.publish, engine.manifest, engine.folder)
    redis = connect(settings.redis_url)
    await rebuild_index(store, EngineIndex(redis))
    await redis.aclose()


@pytest.fixture
async def streams(mesh):
    """Streams of a mesh whose workers are all up."""
    await until(lambda: len(ready_workers(mesh)) == WORKERS, 120)
    async with Streams(mesh.address, mesh.plan.models[0]) as opened:
        yield opened


@pytest.fixture(scope="module")
def without_mesh(smollm2_engine, tmp_path_factory):
    """Token ids of prompts to the engine's own answers, each asked alone, with nothing between."""
    manifest = tmp_path_factory.mktemp("alone") / "manifest.json"
    manifest.write_bytes(smollm2_engine.manifest.to_bytes())
    command = [sys.executable, "-m", "benchmarks.engine_alone", str(smollm2_engine.folder), str(manifest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()

        def answer(ids, max_tokens):
            process.stdin.write(json.dumps({"prompts": [ids], "max_tokens": max_tokens}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())["tokens"][0]

        yield answer
        process.stdin.close()


@pytest.fixture(scope="module")
def tokenizer(smollm2_engine):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(smollm2_engine.folder / smollm2_engine.manifest.tokenizer.file))


async def test_a_greedy_answer_is_the_engines_own_alone_and_among_sixteen(streams, without_mesh, tokenizer):
    expected = {p: without_mesh(tokenizer.encode(p).ids, LENGTH) for p in [PROMPT, *PROMPTS]}
    assert (await streams.run(PROMPT, LENGTH)).tokens == expected[PROMPT]
    together = await asyncio.gather(*streams.start([PROMPT, *PROMPTS], LENGTH))
    assert {p: s.tokens for p, s in zip([PROMPT, *PROMPTS], together, strict=True)} == expected


async def test_text_is_the_decoding_of_the_tokens(streams, tokenizer):
    answer = await streams.run("Répondez: 日本語 😀", LENGTH)
    whole = tokenizer.decode([*tokenizer.encode("Répondez: 日本語 😀").ids, *answer.tokens])
    assert whole.endswith(answer.text)


async def test_a_killed_worker_changes_no_token_of_32_streams(mesh, streams):
    prompts = [*PROMPTS, *(f"A {word} and a" for word in WORDS.split())]
    expected = [stream.tokens for stream in await asyncio.gather(*streams.start(prompts, LENGTH))]
    tasks = streams.start(prompts, LENGTH)
    await until(lambda: all(len(stream.tokens) >= 3 for stream in streams.running), 60)
    os.kill(ready_workers(mesh)[0].process_id, signal.SIGKILL)
    answers = await asyncio.gather(*tasks)
    assert [answer.tokens for answer in answers] == expected


async def test_one_trace_covers_a_long_answer(mesh, streams):
    """All of a 200-token answer's time but 5 % is in the spans below the call's own."""
    trace_id, span_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    parent = [("traceparent", f"00-{trace_id}-{span_id}-01")]
    request = streams.request(PROMPT, 200)
    async for message in streams.stub.Generate(request, metadata=parent):
        if message.HasField("finished"):
            assert message.finished.usage.completion_tokens == 200
    folder = mesh.plan.data_dir / "traces"

    await until(lambda: len(spans.load(folder, trace_id).spans) == 6, 30)
    whole = spans.load(folder, trace_id)
    (call,) = [span for span in whole.spans if span.name.endswith("Inference/Generate")]
    assert call.parent_id == span_id
    assert whole.coverage(call) > 0.95
    names = {span.name.split()[0] for span in whole.spans}
    assert {"admission", "send", "process", "engine.prefill", "engine.decode"} <= names
    by_id = {span.span_id: span for span in whole.spans}
    assert all(span is call or span.parent_id in by_id for span in whole.spans)
