"""One call gives one trace: the gateway's span lasts from arrival to last message, and what runs elsewhere
hangs below it."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from enginemesh.v1 import inference_pb2, inference_pb2_grpc
from mesh import semconv
from mesh.telemetry import extract
from tests.conditions import until
from tests.gateway.helpers import STOP

CALL_SPAN = "enginemesh.v1.Inference/Generate"
CALLER = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


def request(**fields):
    return inference_pb2.GenerateRequest(model="m", prompt="hello", **fields)


async def last(call):
    """Reads a call to its end; when the last message came, in Unix nanoseconds."""
    async for _ in call:
        pass
    return time.time_ns()


def named(spans, name):
    (span,) = [span for span in spans.get_finished_spans() if span.name == name]
    return span


async def test_call_span_lasts_from_arrival_to_last_message(stub, worker, spans):
    # Field case 36: not from the first read, and not until the handler has handed over an iterator.
    sent = time.time_ns()
    call = stub.Generate(request())
    _, handle = await worker.begin()
    reading = asyncio.ensure_future(last(call))
    await worker.send((handle, 0, [*b"a"]))
    between = time.time_ns()
    await worker.send((handle, 1, [*b"b", 0]), finishes=[(handle, STOP)])
    received = await reading
    await until(lambda: any(span.name == CALL_SPAN for span in spans.get_finished_spans()))
    span = named(spans, CALL_SPAN)
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert sent <= span.start_time < between < span.end_time
    # The client may read the last message a little before the server's handler has returned.
    assert abs(span.end_time - received) < 2e9


async def test_children_cover_the_wait_and_share_the_trace(stub, worker, spans):
    call = stub.Generate(request(request_id="mine"))
    queued, handle = await worker.begin()
    await worker.send((handle, 0, [0]), finishes=[(handle, STOP)])
    await last(call)
    await until(lambda: any(span.name == CALL_SPAN for span in spans.get_finished_spans()))
    root, admission, send = (named(spans, name) for name in (CALL_SPAN, "admission", "send m"))
    assert admission.parent.span_id == send.parent.span_id == root.context.span_id
    assert send.kind is SpanKind.PRODUCER
    assert root.start_time <= admission.start_time <= admission.end_time <= send.start_time
    assert root.attributes[semconv.REQUEST_ID] == "mine"
    assert root.attributes[semconv.REQUEST_MODEL] == "m"
    assert root.attributes[semconv.OUTPUT_TOKENS] == 1
    # Field case 35: what the worker starts from the entry hangs below the queue's span.
    carried = trace.get_current_span(extract(queued.traceparent, queued.tracestate)).get_span_context()
    assert carried.trace_id == root.context.trace_id
    assert carried.span_id == send.context.span_id


async def test_callers_trace_goes_on(stub, worker, spans):
    call = stub.Generate(request(), metadata=(("traceparent", f"00-{CALLER[0]}-{CALLER[1]}-01"),))
    queued, handle = await worker.begin()
    await worker.send((handle, 0, [0]), finishes=[(handle, STOP)])
    await last(call)
    await until(lambda: any(span.name == CALL_SPAN for span in spans.get_finished_spans()))
    root = named(spans, CALL_SPAN)
    assert f"{root.context.trace_id:032x}" == CALLER[0]
    assert f"{root.parent.span_id:016x}" == CALLER[1]
    assert CALLER[0] in queued.traceparent


async def test_unsampled_caller_stays_unsampled(stub, worker, spans):
    call = stub.Generate(request(), metadata=(("traceparent", f"00-{CALLER[0]}-{CALLER[1]}-00"),))
    queued, handle = await worker.begin()
    await worker.send((handle, 0, [0]), finishes=[(handle, STOP)])
    await last(call)
    assert queued.traceparent == ""
    assert [span for span in spans.get_finished_spans() if f"{span.context.trace_id:032x}" == CALLER[0]] == []


async def test_refused_call_has_a_span_with_its_reason(stub, spans):
    with pytest.raises(grpc.aio.AioRpcError):
        await last(stub.Generate(request(sampling={"top_p": 2})))
    await until(lambda: any(span.name == CALL_SPAN for span in spans.get_finished_spans()))
    span = named(spans, CALL_SPAN)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes[semconv.ERROR_TYPE] == "INVALID_FIELD"


async def test_cancelled_call_ends_all_its_spans(stub, worker, spans):
    call = stub.Generate(request())
    await worker.take()
    call.cancel()
    await until(lambda: {span.name for span in spans.get_finished_spans()} >= {CALL_SPAN, "send m"})
