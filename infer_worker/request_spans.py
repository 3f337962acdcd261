"""The spans of one attempt on its worker: taken from the queue, prefill, decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace

from mesh import semconv, telemetry

if TYPE_CHECKING:
    from enginemesh.internal.v1 import queue_pb2

_tracer = trace.get_tracer("enginemesh.infer_worker")

_NS_PER_US = 1000


class RequestSpans:
    """What the spans of a request need to know from its beginning. Times are Unix microseconds.

    The spans are made when the attempt is over, from times that were noted: none of that work stands
    between a request and its first token.

    Args:
        request: As it came from the queue; it is not kept.
        taken_us: When it was taken.
        stream: The queue that it came from.
        model: Its model.
        worker_id: This worker.
    """

    __slots__ = ("_attributes", "_name", "_taken_us", "_traceparent", "_tracestate")

    def __init__(
        self, request: queue_pb2.QueuedRequest, *, taken_us: int, stream: str, model: str, worker_id: str
    ) -> None:
        self._traceparent, self._tracestate = request.traceparent, request.tracestate
        self._taken_us = taken_us
        self._name = f"process {model}"
        self._attributes: dict[str, str | int] = {
            semconv.OPERATION: "text_completion",
            semconv.PROVIDER: semconv.PROVIDER_VALUE,
            semconv.REQUEST_MODEL: model,
            semconv.MESSAGING_SYSTEM: semconv.MESSAGING_SYSTEM_VALUE,
            semconv.MESSAGING_OPERATION_NAME: "process",
            semconv.MESSAGING_OPERATION_TYPE: "process",
            semconv.MESSAGING_DESTINATION: stream,
            semconv.MESSAGING_MESSAGE_ID: request.request_id,
            semconv.MESSAGING_CLIENT_ID: worker_id,
            semconv.REQUEST_ID: request.request_id,
            semconv.ATTEMPT: request.attempt,
            semconv.WORKER: worker_id,
            semconv.GATEWAY: request.gateway_id,
            semconv.INPUT_TOKENS: len(request.prompt_ids),
        }

    def record(
        self, *, started_us: int, first_token_us: int, ended_us: int, reason: str, tokens: int, error: str
    ) -> None:
        """Makes the spans, unless the request's trace is not recorded.

        Args:
            started_us: When the engine got the sequence.
            first_token_us: When a step gave its first token; 0: none did.
            ended_us: When it was over on this worker.
            reason: "stop", "length", "error", "refused", "cancelled".
            tokens: New tokens that this attempt gave.
            error: What went wrong; empty if nothing did.
        """
        context = telemetry.extract(self._traceparent, self._tracestate)
        if not trace.get_current_span(context).get_span_context().trace_flags.sampled:
            return
        process = _tracer.start_span(
            self._name,
            context=context,
            kind=trace.SpanKind.CONSUMER,
            attributes=self._attributes,
            start_time=self._taken_us * _NS_PER_US,
        )
        process.set_attributes({semconv.OUTPUT_TOKENS: tokens, semconv.RESPONSE_FINISH_REASONS: [reason]})
        if error:
            process.set_status(trace.StatusCode.ERROR, error)
        inside = trace.set_span_in_context(process)
        prefill = _tracer.start_span("engine.prefill", inside, start_time=started_us * _NS_PER_US)
        if first_token_us:
            prefill.add_event(semconv.FIRST_TOKEN_EVENT, timestamp=first_token_us * _NS_PER_US)
            prefill.end(first_token_us * _NS_PER_US)
            decode = _tracer.start_span("engine.decode", inside, start_time=first_token_us * _NS_PER_US)
            decode.end(ended_us * _NS_PER_US)
        else:
            prefill.end(ended_us * _NS_PER_US)
        process.end(ended_us * _NS_PER_US)
