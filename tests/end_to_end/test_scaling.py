"""`enginemesh up --scale` as a user runs it: workers come when requests wait, and go when none do."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cli.client import Client
from enginemesh.v1 import inference_pb2, models_pb2
from tests.end_to_end.test_up import Mesh, until

SLOTS = 2
STREAMS = 4 * SLOTS
TOKENS = 50
WAIT_LIMIT_S = 0.5
MODEL_FILE = f"""
model: scaled
kind: fake
max_batch_size: {SLOTS}
options:
  step_ms: 20
serving:
  max_workers: 2
  scale_down_after_s: 2
"""
STUCK_FILE = f"""
model: stuck
kind: fake
options:
  load_error: no such engine
serving:
  max_waiting_s: {WAIT_LIMIT_S}
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory, valkey, s3):
    """A mesh that scales two models, of which one has an engine that does not load."""
    folder = tmp_path_factory.mktemp("scale")
    files = [folder / "scaled.yaml", folder / "stuck.yaml"]
    for file, text in zip(files, (MODEL_FILE, STUCK_FILE), strict=True):
        file.write_text(text)
    # The servers of this run of tests, as their start takes longer than all the rest.
    stores = {**valkey.settings, **s3.settings, "ENGINEMESH_S3_BUCKET": f"scale-{uuid.uuid4().hex[:12]}"}
    started = Mesh(folder, "--scale", *map(str, files), **stores)
    started.wait_ready()
    yield started
    started.process.terminate()
    started.process.wait(60)


@pytest.fixture
def client(mesh):
    """A client of its gateway."""
    with Client(f"127.0.0.1:{mesh.port}", 16 << 20) as opened:
        yield opened


def generate(client, model, tokens, timeout=60.0):
    """The token ids of an answer, and its terminal messages."""
    request = inference_pb2.GenerateRequest(
        model=model,
        prompt="hello",
        sampling={"max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        return_token_ids=True,
    )
    ids, ends = [], []
    for message in client.inference.Generate(request, timeout=timeout):
        ids += message.delta.token_ids
        ends += [message.finished] if message.HasField("finished") else []
    return ids, ends


def generate_until(is_enough, client, tokens):
    """Asks again and again."""
    answers = []
    while not answers or not is_enough.is_set():
        answers.append(generate(client, "scaled", tokens))
    return answers


def test_workers_come_with_requests_and_go_without(mesh, client):
    assert client.model("scaled").state == models_pb2.MODEL_STATE_SCALED_TO_ZERO
    assert not client.ready_workers()

    with ThreadPoolExecutor(STREAMS) as pool:
        first = pool.submit(generate, client, "scaled", TOKENS)
        waiting = until(lambda: (model := client.model("scaled")).queued_requests and model)
        assert waiting.state == models_pb2.MODEL_STATE_WAITING_FOR_WORKER
        expected, (end,) = first.result()
        assert end.usage.completion_tokens == len(expected) == TOKENS

        is_enough = Event()
        many = [pool.submit(generate_until, is_enough, client, len(expected)) for _ in range(STREAMS)]
        try:
            until(lambda: client.model("scaled").workers == 2)
        finally:
            is_enough.set()
        answers = [answer for asked in many for answer in asked.result()]
    assert len(answers) >= STREAMS
    assert all(ids == expected and len(ends) == 1 for ids, ends in answers)

    until(lambda: client.model("scaled").state == models_pb2.MODEL_STATE_SCALED_TO_ZERO)
    (shown,) = [m for m in json.loads(mesh.command("models", "--json")) if m["name"] == "models/scaled"]
    assert shown["state"] == "MODEL_STATE_SCALED_TO_ZERO"
    assert "scaled: 1 waiting; worker-scaled-1 starts" in mesh.text()
    assert "is no longer needed and stops" in mesh.text()
    assert "is killed" not in mesh.text()


def test_a_request_that_no_worker_can_take_ends_with_its_limit(client):
    with pytest.raises(grpc.RpcError) as caught:
        generate(client, "stuck", 10)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"no worker took the request within {WAIT_LIMIT_S:g} s" in caught.value.details()
    (info,) = [
        d for d in rpc_status.from_call(caught.value).details if d.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
    ]
    unpacked = error_details_pb2.ErrorInfo()
    info.Unpack(unpacked)
    assert unpacked.metadata["limit"] == "serving.max_waiting_s"


def test_a_request_that_no_worker_can_take_ends_with_its_deadline(client):
    with pytest.raises(grpc.RpcError) as caught:
        generate(client, "stuck", 10, timeout=WAIT_LIMIT_S / 2)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
