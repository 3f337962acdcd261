"""Generate, from call to last message, with a worker that the test drives."""

import asyncio
from datetime import datetime, timezone

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from enginemesh.v1 import inference_pb2, inference_pb2_grpc
from mesh.bus import keys
from mesh.bus.index import EngineIndex
from mesh.engine_store import EngineRecord
from mesh.model_fields import ServingSettings
from tests.conditions import until
from tests.gateway.helpers import ERROR, LENGTH, STOP
from tests.gateway.scripted_worker import ScriptedWorker


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


def request(prompt="hi", **fields):
    sampling = {"max_tokens": 8, "temperature": 0, **fields.pop("sampling", {})}
    return inference_pb2.GenerateRequest(model="m", prompt=prompt, sampling=sampling, **fields)


async def collect(call):
    """The whole answer: text, and the terminal message."""
    text, finished = "", None
    async for message in call:
        assert finished is None, "nothing may follow the terminal message"
        text += message.delta.text
        if message.HasField("finished"):
            finished = message.finished
    return text, finished


async def queue_length(redis):
    return sum([await redis.xlen(keys.model_stream("m", priority)) for priority in keys.PRIORITIES])


def details_of(error, kind):
    status = rpc_status.from_call(error)
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            found = kind()
            detail.Unpack(found)
            return found
    raise AssertionError(f"no {kind.__name__} in {status}")


async def test_an_answer_streams_and_leaves_nothing(stub, worker, gateway, redis):
    answer = asyncio.ensure_future(collect(stub.Generate(request("hello"))))
    queued, handle = await worker.begin()
    assert bytes(queued.prompt_ids) == b"hello"
    await worker.send((handle, 0, [*b"wor"]))
    await worker.send((handle, 3, [*b"ld", 0]), finishes=[(handle, STOP)])
    text, finished = await answer
    assert text == "world"
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 6)
    assert finished.worker == "workers/w1"
    assert await queue_length(redis) == 0
    assert len(gateway.table) == 0


async def test_a_conversation_goes_through_the_chat_template(stub, worker):
    chat = {"messages": [{"role": "user", "content": "hey"}]}
    message = inference_pb2.GenerateRequest(model="models/m", chat=chat)
    call = stub.Generate(message)
    queued = await worker.take()
    assert bytes(queued.prompt_ids) == b"<user>hey<assistant>"
    call.cancel()


async def serve_with(gateway, **settings):
    """Gives the model of these tests other serving settings, and waits until the gateway knows them."""
    wanted = ServingSettings(**settings)
    await gateway._index.serving.put("m", wanted)

    async def knows():
        return (await gateway.catalogue.model("m")).serving == wanted

    await until(knows)


async def test_the_model_limits_answers_without_max_tokens(stub, worker, gateway):
    await serve_with(gateway, default_max_tokens=5)
    call = stub.Generate(inference_pb2.GenerateRequest(model="m", prompt="hi"))
    assert (await worker.take()).sampling.max_tokens == 5
    call.cancel()


async def test_a_request_that_no_worker_takes_in_time_is_given_up(stub, gateway, redis):
    await serve_with(gateway, max_waiting_s=0.2)
    with pytest.raises(grpc.aio.AioRpcError, match=r"no worker took the request within 0\.2 s") as caught:
        await collect(stub.Generate(request(), timeout=20))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 200
    await until(lambda: not gateway.table and not gateway.dispatcher._patience)
    await until(lambda: _is_empty(redis))


async def _is_empty(redis):
    return await queue_length(redis) == 0


async def test_a_request_that_a_worker_took_is_never_given_up(stub, worker, gateway):
    await serve_with(gateway, max_waiting_s=30)
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    _, handle = await worker.begin()
    assert not gateway.dispatcher._patience
    await worker.send((handle, 0, [*b"ok", 0]), finishes=[(handle, STOP)])
    assert (await answer)[0] == "ok"


async def test_two_requests_share_frames(stub, worker):
    answers = [asyncio.ensure_future(collect(stub.Generate(request(p)))) for p in ("a", "b")]
    handles = {}
    for _ in range(2):
        queued, handle = await worker.begin()
        handles[bytes(queued.prompt_ids)] = handle
    rows = [(handles[b"a"], 0, [*b"A"]), (handles[b"b"], 0, [*b"B"])]
    await worker.send(*rows, finishes=[(handle, LENGTH) for handle in handles.values()])
    assert [(await answer)[0] for answer in answers] == ["A", "B"]


async def test_a_stop_string_ends_the_sequence_at_the_worker(stub, worker):
    answer = asyncio.ensure_future(collect(stub.Generate(request(sampling={"stop": ["END"]}))))
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"okEN"]))
    await worker.send((handle, 4, [*b"D?"]))
    assert (await worker.receive("cancels")).cancels == [handle]
    text, finished = await answer
    assert (text, finished.stop_string) == ("ok", "END")


async def test_a_cancelled_call_is_withdrawn_from_the_queue(stub, gateway, redis):
    """Field case 11, before it runs."""
    call = stub.Generate(request())

    async def is_queued():
        return await queue_length(redis) == 1

    async def is_gone():
        return await queue_length(redis) == 0 and len(gateway.table) == 0

    reading = asyncio.ensure_future(collect(call))
    await until(is_queued)
    call.cancel()
    await until(is_gone)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_cancelled_call_stops_its_sequence(stub, worker, gateway):
    """Field case 11, while it runs."""
    call = stub.Generate(request())
    reading = asyncio.ensure_future(collect(call))
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"a"]))
    call.cancel()
    assert (await worker.receive("cancels")).cancels == [handle]
    with pytest.raises(asyncio.CancelledError):
        await reading

    async def is_empty():
        return len(gateway.table) == 0

    await until(is_empty)


async def test_a_deadline_in_the_queue_ends_the_call_and_its_entry(stub, gateway, redis):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request(), timeout=0.3))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    async def is_gone():
        return await queue_length(redis) == 0 and len(gateway.table) == 0

    await until(is_gone)


async def test_a_broken_link_moves_the_request_from_where_it_was(stub, worker, second_worker):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"abc"]))
    await asyncio.sleep(0)
    moved = asyncio.ensure_future(second_worker.take())
    await until_received(stub, worker)
    await worker.break_link()
    queued = await asyncio.wait_for(moved, 10)
    assert queued.attempt == 2
    rest = b"abcdef"[len(queued.generated_ids) :]
    handle = await second_worker.claim(queued)
    await second_worker.send((handle, 0, [*rest]), finishes=[(handle, LENGTH)])
    text, finished = await answer
    assert text == "abcdef"
    assert (finished.timings.attempts, finished.worker) == (2, "workers/w2")


async def until_received(stub, worker):
    """Frames travel in order, so a request that the worker sees end was sent after them."""
    call = stub.Generate(request("marker", priority="PRIORITY_HIGH"))
    reading = asyncio.ensure_future(collect(call))
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"x"]), finishes=[(handle, LENGTH)])
    await reading


async def test_a_silent_worker_is_left_though_its_socket_is_open(stub, worker, second_worker):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    await worker.begin()
    worker.is_beating = False
    queued = await asyncio.wait_for(second_worker.take(), 10)
    assert queued.attempt == 2
    await worker.closed()
    handle = await second_worker.claim(queued)
    await second_worker.send((handle, 0, [*b"z"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "z"


async def test_a_slow_worker_that_beats_is_left_alone(stub, worker, gateway):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    _, handle = await worker.begin()
    await asyncio.sleep(2 * 0.6)  # twice the silence limit, the time that is under test
    await worker.send((handle, 0, [*b"z"]), finishes=[(handle, LENGTH)])
    text, finished = await answer
    assert (text, finished.timings.attempts) == ("z", 1)


async def test_an_engine_error_moves_the_request_until_attempts_run_out(stub, worker):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    for attempt in (1, 2, 3):
        queued, handle = await worker.begin()
        assert queued.attempt == attempt
        offset_rows = [(handle, 0, [*b"a"])] if attempt == 1 else []
        await worker.send(*offset_rows, finishes=[(handle, ERROR)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    info = details_of(caught.value, error_details_pb2.ErrorInfo)
    assert (info.reason, info.metadata["tokens_sent"]) == ("ATTEMPTS_EXHAUSTED", "1")


async def test_missing_tokens_are_asked_for_again(stub, worker):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    _, handle = await worker.begin()
    await worker.send((handle, 2, [*b"c"]))
    resend = (await worker.receive("resends")).resends[0]
    assert (resend.handle, resend.offset) == (handle, 0)
    await worker.send((handle, 0, [*b"abc"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "abc"


async def test_an_entry_that_a_dead_worker_took_is_run_by_another(stub, worker, second_worker):
    """Field case 3: once, by the other."""
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    taken = await worker.take()
    again = await asyncio.wait_for(second_worker.take(claim=True), 10)
    assert (again.request_id, again.attempt) == (taken.request_id, 1)
    handle = await second_worker.claim(again)
    assert await worker.claim(taken) is None
    await second_worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "y"


async def test_an_entry_that_redis_lost_is_queued_again(stub, worker, redis):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))

    async def is_queued():
        return await queue_length(redis) == 1

    await until(is_queued)
    await redis.delete(*[keys.model_stream("m", priority) for priority in keys.PRIORITIES])
    _, handle = await asyncio.wait_for(worker.begin(), 10)
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "y"


async def test_a_name_in_flight_is_refused_and_its_holder_goes_on(stub, worker):
    first = asyncio.ensure_future(collect(stub.Generate(request(request_id="same"))))
    taken = await worker.take()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request(request_id="same")))
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    handle = await worker.claim(taken)
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await first)[0] == "y"


@pytest.mark.parametrize(
    "changes", [{}, {"max_seq_len": 1 << 10}, {"max_input_len": 1}, {"capabilities": ()}], ids=str
)
async def test_a_waiting_request_runs_on_an_engine_that_was_published_since(
    stub, redis, engine, gateway, changes
):
    # If it can run it at all. All workers may have gone over to a new engine while a request waited.
    answer = asyncio.ensure_future(collect(stub.Generate(request(sampling={"max_tokens": 2000, "seed": 1}))))
    newer = engine.model_copy(update={"build_key": "b" * 64, **changes})
    worker = ScriptedWorker(redis, "w1", engine=newer.digest)
    taken = await worker.take()
    await EngineIndex(redis).add(EngineRecord(newer, datetime.now(timezone.utc)))
    await until(lambda: newer.digest in gateway.catalogue._models["m"].engines)
    handle = await worker.claim(taken)
    assert (handle is None) is bool(changes)
    if handle is not None:
        await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
        assert (await answer)[0] == "y"
    answer.cancel()
    await worker.close()


async def test_a_worker_whose_engine_cannot_run_a_request_costs_it_nothing(stub, worker, redis):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    stranger = ScriptedWorker(redis, "stranger", engine="f" * 64)
    assert await stranger.claim(await stranger.take()) is None
    await stranger.close()
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await answer)[1].worker == "workers/w1"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"model": "unknown", "prompt": "x"}, grpc.StatusCode.NOT_FOUND, None),
        (
            {"model": "m", "prompt": "x", "sampling": {"top_p": 2}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.top_p",
        ),
        (
            {"model": "m", "token_ids": {"ids": [1, 256]}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids.ids[1]",
        ),
        ({"model": "m", "prompt": "x", "sampling": {"logprobs": 1}}, grpc.StatusCode.UNIMPLEMENTED, None),
        (
            {"model": "m", "token_ids": {"ids": [1] * (1 << 20)}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids",
        ),
    ],
)
async def test_a_bad_request_is_refused_and_the_next_one_served(stub, worker, fields, code, field):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(inference_pb2.GenerateRequest(**fields)))
    assert caught.value.code() == code
    assert details_of(caught.value, error_details_pb2.ErrorInfo).domain == "enginemesh"
    if field:
        assert details_of(caught.value, error_details_pb2.BadRequest).field_violations[0].field == field
    await serve_one(stub, worker)


async def serve_one(stub, worker):
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "y"


async def test_invalid_utf8_names_the_field(channel, stub, worker):
    raw = channel.unary_stream("/enginemesh.v1.Inference/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(raw(b"\x0a\x01m\x12\x02\xff\xfe"))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(caught.value, error_details_pb2.BadRequest).field_violations[0].field == "prompt"
    await serve_one(stub, worker)


@pytest.mark.parametrize("prompt", ['\\"', "\0", "\ud7ff\ue000", "x" * 1_000_000])
async def test_odd_prompts_are_answered(stub, worker, prompt):
    answer = asyncio.ensure_future(collect(stub.Generate(request(prompt))))
    queued, handle = await worker.begin()
    assert bytes(queued.prompt_ids).decode() == prompt
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "y"


async def test_a_client_that_reads_slowly_gets_merged_deltas(stub, worker):
    call = stub.Generate(request(sampling={"max_tokens": 4000}))
    _, handle = await worker.begin()
    for offset in range(0, 4000, 4):
        await worker.send((handle, offset, [*b"abcd"]), finishes=[(handle, LENGTH)] if offset == 3996 else [])
    text, finished = await collect(call)
    assert text == "abcd" * 1000
    assert finished.usage.completion_tokens == 4000


async def test_a_client_that_stops_reading_is_cut_off_with_the_limit(gateway, worker):
    gateway.inference._settings = gateway.inference._settings.model_copy(update={"stall_limit_s": 0.3})
    sweep = asyncio.ensure_future(gateway.inference.watch_stalls())
    # A fixed window of 64 KiB: by default the client's library reads ahead by megabytes.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}", options=options) as slow:
        call = inference_pb2_grpc.InferenceStub(slow).Generate(request(sampling={"max_tokens": 1 << 19}))
        _, handle = await worker.begin()
        chunk = [*b"abcd" * 16_384]
        for offset in range(0, 1 << 19, len(chunk)):
            await worker.send((handle, offset, chunk))
        assert (await worker.receive("cancels")).cancels == [handle]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
    assert details_of(caught.value, error_details_pb2.ErrorInfo).reason == "SLOW_CONSUMER"
    assert len(gateway.table) == 0
    sweep.cancel()
