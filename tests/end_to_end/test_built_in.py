"""What is built into an engine, through a whole mesh: an adapter, prompt lookup, a draft model.

The model is tiny, so that NumPy says what the answers must be.
"""

from __future__ import annotations

import grpc
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from cli.embedded import free_port
from cli.local_mesh import LocalMesh, Plan
from cli.up import build_model, wait_for_models
from mesh import capabilities
from mesh.model_file import ModelFile
from tests.build_worker import tiny_hub
from tests.end_to_end.streams import Streams

pytestmark = [pytest.mark.openvino, pytest.mark.timeout(300)]

PROMPT = "hello world, hello world, hello"
LENGTH = 24
TUNED, DRAFTED = "tuned", "drafted"
COMMON = {"kind": "openvino", "source": "model", "precision": "fp16", "max_batch_size": 4}
SPECS = [
    ModelFile(
        model=TUNED,
        lora=[{"name": "tone", "source": "adapter"}],
        speculation={"method": "prompt_lookup", "tokens": 3},
        **COMMON,
    ),
    ModelFile(
        model=DRAFTED,
        speculation={"method": "draft_model", "source": "model", "precision": "int4"},
        kv_cache_precision="f16",
        chat_template="{{ 'hello' }}",
        **COMMON,
    ),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The folder of the model and of its adapter, the model's weights, and those with the adapter."""
    folder = tmp_path_factory.mktemp("sources")
    weights = tiny_hub.write_tiny_hub(folder / "model")
    lora = tiny_hub.write_tiny_lora(folder / "adapter", modules=tuple(tiny_hub.MODULES))
    return folder, weights, tiny_hub.merged(weights, lora)


@pytest.fixture(scope="module")
def mesh(sources, tmp_path_factory):
    """A mesh that has built both models and serves them."""
    console = Console(quiet=True)
    models = tuple(spec.model for spec in SPECS)
    plan = Plan(tmp_path_factory.mktemp("mesh"), free_port(), "openvino", models, 1, (sources[0],))
    with LocalMesh(plan, console.print) as running:
        for spec in SPECS:
            build_model(running, spec, console)
        wait_for_models(running, models, console)
        yield running


@pytest.fixture(scope="module")
def prompt_ids(sources):
    return Tokenizer.from_file(str(sources[0] / "model" / "tokenizer.json")).encode(PROMPT).ids


async def test_answers_are_those_of_the_model_with_its_adapter(mesh, sources, prompt_ids):
    _, weights, merged = sources
    async with Streams(mesh.address, TUNED) as streams:
        answer = await streams.run(PROMPT, LENGTH)

    assert answer.tokens == tiny_hub.greedy(merged, prompt_ids, LENGTH)
    assert answer.tokens != tiny_hub.greedy(weights, prompt_ids, LENGTH)


async def test_a_draft_model_changes_no_answer(mesh, sources, prompt_ids):
    async with Streams(mesh.address, DRAFTED) as streams:
        answer = await streams.run(PROMPT, LENGTH)

    assert answer.tokens == tiny_hub.greedy(sources[1], prompt_ids, LENGTH)


async def test_what_a_draft_model_cannot_do_is_refused_by_the_gateway(mesh):
    async with Streams(mesh.address, DRAFTED) as streams:
        request = streams.request(PROMPT, LENGTH, sampling={"temperature": 0.7})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await streams.stub.Generate(request).read()

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details().startswith("sampling.temperature: no engine of 'drafted' can do this")


def test_listings_say_what_is_built_in(mesh):
    with mesh.client() as client:
        tuned, drafted = (next(iter(client.engines(f"models/{name}"))) for name in (TUNED, DRAFTED))

    assert tuned.options["lora"] == "tone"
    assert tuned.options["speculation"] == "prompt_lookup"
    assert tuned.options["kv_cache_precision"] == "f32"
    assert capabilities.REPRODUCIBLE in tuned.capabilities
    assert drafted.options["speculation"] == "draft_model"
    assert capabilities.GREEDY_ONLY in drafted.capabilities
    assert capabilities.REPRODUCIBLE not in drafted.capabilities
