"""The spans of a request on its worker."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from mesh import semconv, telemetry
from tests.conditions import until
from tests.infer_worker.scripted_gateway import MODEL

tracer = trace.get_tracer("test")


def by_name(spans, name):
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_spans_cover_the_request_from_take_to_end(serve, gateway, spans):
    await serve(step_ms=10)
    with tracer.start_as_current_span("send m", kind=SpanKind.PRODUCER) as producer:
        traceparent, tracestate = telemetry.inject()
    request = gateway.request("r1", max_tokens=20)
    request.traceparent, request.tracestate = traceparent, tracestate
    await gateway.queue_message(request)
    await gateway.answer("r1")
    await until(lambda: by_name(spans, f"process {MODEL}"))

    (process,) = by_name(spans, f"process {MODEL}")
    (prefill,) = by_name(spans, "engine.prefill")
    (decode,) = by_name(spans, "engine.decode")
    # Seen as eventsourcing_helpers 109: consumer spans became roots.
    assert process.parent.span_id == producer.get_span_context().span_id
    assert process.context.trace_id == producer.get_span_context().trace_id
    assert process.kind is SpanKind.CONSUMER
    assert {span.parent.span_id for span in (prefill, decode)} == {process.context.span_id}
    assert prefill.end_time == decode.start_time
    assert decode.end_time == process.end_time
    covered = decode.end_time - prefill.start_time
    assert covered > 19 * 10 * 1_000_000 * 0.9
    assert [event.name for event in prefill.events] == [semconv.FIRST_TOKEN_EVENT]
    assert process.attributes[semconv.INPUT_TOKENS] == 3
    assert process.attributes[semconv.OUTPUT_TOKENS] == 20
    assert process.attributes[semconv.RESPONSE_FINISH_REASONS] == ("length",)
    assert process.attributes[semconv.REQUEST_ID] == "r1"
    assert process.attributes[semconv.MESSAGING_SYSTEM] == "redis"


async def test_request_that_is_not_sampled_leaves_no_span(serve, gateway, spans):
    await serve()
    for number, traceparent in enumerate(("", f"00-{'1' * 32}-{'2' * 16}-00", "no traceparent")):
        request = gateway.request(f"r{number}")
        request.traceparent = traceparent
        await gateway.queue_message(request)
        await gateway.answer(f"r{number}")
    assert spans.get_finished_spans() == ()


async def test_failed_request_has_an_error_in_its_span(serve, gateway, spans):
    await serve(max_seq_len=10)
    request = gateway.request("r1", prompt=[1] * 20)
    request.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    await gateway.queue_message(request)
    await gateway.answer("r1")
    (process,) = by_name(spans, f"process {MODEL}")
    assert process.status.status_code is StatusCode.ERROR
    assert process.attributes[semconv.RESPONSE_FINISH_REASONS] == ("refused",)


async def test_cancelled_request_ends_its_spans(serve, gateway, spans):
    await serve()
    request = gateway.request("r1", max_tokens=9_000)
    request.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    await gateway.queue_message(request)
    answer = await gateway.tokens("r1", 3)
    gateway.links[0].send(cancels=[answer.handle])
    await until(lambda: by_name(spans, f"process {MODEL}"))
    names = sorted(span.name for span in spans.get_finished_spans())
    assert names == ["engine.decode", "engine.prefill", f"process {MODEL}"]
    (process,) = by_name(spans, f"process {MODEL}")
    assert process.attributes[semconv.RESPONSE_FINISH_REASONS] == ("cancelled",)
    assert all(span.start_time <= span.end_time for span in spans.get_finished_spans())
