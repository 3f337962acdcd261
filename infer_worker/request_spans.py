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
    """Spans of a request that is traced. Times are Unix microseconds, as steps carry them.

    A span that is never ended is never exported: an attempt that was not confirmed leaves no trace.
    """

    __slots__ = ("_child", "_process")

    def __init__(self, process: trace.Span) -> None:
        self._process = process
        self._child: trace.Span | None = None

    @classmethod
    def begin(
        cls, request: queue_pb2.QueuedRequest, *, taken_us: int, stream: str, model: str, worker_id: str
    ) -> RequestSpans | None:
        """Begins at the time when the request was taken; None if its trace is not recorded."""
        if not request.traceparent:
            return None
        context = telemetry.extract(request.traceparent, request.tracestate)
        if not trace.get_current_span(context).get_span_context().trace_flags.sampled:
            return None
        attributes: dict[str, str | int] = {
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
        span = _tracer.start_span(
            f"process {model}",
            context=context,
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            start_time=taken_us * _NS_PER_US,
        )
        return cls(span)

    def started(self, now_us: int) -> None:
        """The engine has the sequence."""
        self._start_child("engine.prefill", now_us)

    def first_token(self, now_us: int) -> None:
        """A step gave the first token: prefill is over, decode begins."""
        if self._child is not None:
            self._child.add_event(semconv.FIRST_TOKEN_EVENT, timestamp=now_us * _NS_PER_US)
            self._child.end(now_us * _NS_PER_US)
        self._start_child("engine.decode", now_us)

    def ended(self, now_us: int, reason: str, tokens: int, error: str) -> None:
        """The attempt is over on this worker.

        Args:
            now_us: When.
            reason: "stop", "length", "error", "refused", "cancelled".
            tokens: New tokens that this attempt gave.
            error: What went wrong; empty if nothing did.
        """
        if self._child is not None:
            self._child.end(now_us * _NS_PER_US)
        self._process.set_attributes(
            {semconv.OUTPUT_TOKENS: tokens, semconv.RESPONSE_FINISH_REASONS: [reason]}
        )
        if error:
            self._process.set_status(trace.StatusCode.ERROR, error)
        self._process.end(now_us * _NS_PER_US)

    def _start_child(self, name: str, now_us: int) -> None:
        context = trace.set_span_in_context(self._process)
        self._child = _tracer.start_span(name, context=context, start_time=now_us * _NS_PER_US)
