"""What is easily lost, leaked or waited for in vain: field cases 2, 5, 10, 25, 27 and 29."""

import asyncio
import os
import signal
import sys

import grpc
import pytest

from enginemesh.v1 import inference_pb2_grpc
from gateway import catalogue
from mesh import transport
from tests.conditions import until
from tests.gateway.helpers import LENGTH
from tests.gateway.scripted_worker import ScriptedWorker
from tests.gateway.test_inference import collect, queue_length, request

SLACK_S = 1.0


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


async def test_callers_that_leave_the_queue_give_back_their_places(gateway, stub, worker, redis):
    """Case 2: one runs, fifty queue and leave, the first ends: the next is served at once."""
    first = asyncio.ensure_future(collect(stub.Generate(request("first"))))
    _, handle = await worker.begin()
    leaving = [stub.Generate(request(f"{n}")) for n in range(50)]
    await until(lambda: len(gateway.table) == 51)
    for call in leaving:
        call.cancel()
    await until(lambda: len(gateway.table) == 1)

    async def is_empty():
        return await queue_length(redis) == 0

    await until(is_empty)
    assert gateway.dispatcher.room.depth()["m"] == (0, 0)
    await worker.send((handle, 0, [*b"x"]), finishes=[(handle, LENGTH)])
    await first
    last = asyncio.ensure_future(collect(stub.Generate(request("last"))))
    queued, handle = await worker.begin()
    assert bytes(queued.prompt_ids) == b"last"
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await last)[0] == "y"


async def test_a_worker_that_never_answers_holds_up_only_its_own(stub, worker, second_worker):
    """Case 5: its requests end by their deadline, with a typed error; the others do not wait for them."""
    stuck = asyncio.ensure_future(collect(stub.Generate(request("stuck"), timeout=3)))
    await worker.begin()
    for number in range(20):
        answer = asyncio.ensure_future(collect(stub.Generate(request(f"{number}"))))
        _, handle = await second_worker.begin()
        await second_worker.send((handle, 0, [*b"x"]), finishes=[(handle, LENGTH)])
        assert (await answer)[1].worker == "workers/w2"
    assert not stuck.done()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stuck
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_entry_outlives_every_worker_that_dies_holding_it(stub, redis, engine):
    """Cases 25, 27, 29: nothing is held by a name or a lock, so each next worker may claim it."""
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    for number in range(4):
        dying = ScriptedWorker(redis, f"dying-{number}", engine=engine.digest)
        taken = await asyncio.wait_for(dying.take(claim=True), 10)
        assert taken.attempt == 1
    last = ScriptedWorker(redis, "last", engine=engine.digest)
    handle = await last.claim(await asyncio.wait_for(last.take(claim=True), 10))
    await last.send((handle, 0, [*b"x"]), finishes=[(handle, LENGTH)])
    assert (await answer)[1].worker == "workers/last"
    assert await queue_length(redis) == 0
    await last.close()


CLIENT = """
import sys, grpc
from enginemesh.v1 import inference_pb2, inference_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = inference_pb2.GenerateRequest(model="m", prompt="hi", sampling={"max_tokens": 100000})
    for message in inference_pb2_grpc.InferenceStub(channel).Generate(request):
        print(message.delta.text, flush=True)
"""


async def test_a_client_that_falls_silent_without_a_reset_is_noticed(gateway, worker):
    """Case 10: its socket stays open and its kernel acknowledges, but nobody answers pings."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, f"127.0.0.1:{gateway.port}", stdout=asyncio.subprocess.PIPE
    )
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"a"]))
    assert await client.stdout.readline() == b"a\n"
    os.kill(client.pid, signal.SIGSTOP)
    limit_s = (transport.KEEPALIVE_TIME_MS + transport.KEEPALIVE_TIMEOUT_MS) / 1000 + SLACK_S
    try:
        cancelled = await asyncio.wait_for(worker._inbox.get(), limit_s)
        assert list(cancelled.cancels) == [handle]
        await until(lambda: len(gateway.table) == 0)
    finally:
        client.kill()
        await client.wait()


async def test_models_are_served_while_redis_has_lost_the_index(gateway, stub, worker, redis, monkeypatch):
    assert "m" in await gateway.catalogue.names()
    await gateway.catalogue.model("m")
    begun, may_end = asyncio.Event(), asyncio.Event()
    rebuild = catalogue.rebuild_index

    async def rebuild_in_the_end(store, index):
        begun.set()
        await may_end.wait()
        await rebuild(store, index)

    monkeypatch.setattr(catalogue, "rebuild_index", rebuild_in_the_end)
    await redis.flushall()
    await asyncio.wait_for(begun.wait(), 10)
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "y"
    assert await gateway.catalogue.names() == ["m"]
    assert await _code_of_unknown_model(stub) == grpc.StatusCode.UNAVAILABLE
    may_end.set()

    async def is_mended():
        return await _code_of_unknown_model(stub) == grpc.StatusCode.NOT_FOUND

    await until(is_mended)


async def _code_of_unknown_model(stub):
    unknown = request()
    unknown.model = "unheard-of"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(unknown))
    return caught.value.code()
