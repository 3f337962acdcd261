"""What one Generate call leaves in traces and metrics.

The call's span lasts from its arrival to its last message: it is held here by the handler, which runs for
all that time, and is never made current inside a generator (contextvars would leak between tasks).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace

from enginemesh.v1 import inference_pb2
from mesh import metrics, semconv
from mesh.errors import MeshError
from mesh.telemetry import NotedSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context

    from gateway.session import Session

tracer = trace.get_tracer("enginemesh.gateway")

SPAN_NAME = "enginemesh.v1.Inference/Generate"


class RequestTrace:
    """The server span of one call, its admission, and the metrics at its end.

    Args:
        parent: The caller's trace context.
        arrived: When the call arrived, in seconds of the event loop's clock.
    """

    def __init__(self, parent: Context, arrived: float) -> None:
        self.span = tracer.start_span(SPAN_NAME, context=parent, kind=trace.SpanKind.SERVER)
        self._arrived = arrived
        self._model = ""
        self._admission: NotedSpan | None = None
        metrics.REQUESTS_ACTIVE.add(1)

    @contextmanager
    def admission(self) -> Iterator[None]:
        """The time in which the request is checked and tokenised."""
        if not self.span.is_recording():
            yield
            return
        self._admission = NotedSpan(self.span, "admission")
        try:
            yield
        finally:
            self._admission.end()

    def admitted(self, session: Session) -> None:
        """The request was accepted: what it asks for."""
        self._model = session.model
        session.span = self.span
        if not self.span.is_recording():
            return
        sampling = session.sampling
        self.span.set_attributes(
            {
                semconv.OPERATION: "text_completion",
                semconv.PROVIDER: semconv.PROVIDER_VALUE,
                semconv.REQUEST_MODEL: session.model,
                semconv.REQUEST_ID: session.request_id,
                semconv.REQUEST_MAX_TOKENS: sampling.max_tokens,
                semconv.REQUEST_TEMPERATURE: sampling.temperature,
                semconv.INPUT_TOKENS: len(session.prompt_ids),
                semconv.PRIORITY: session.priority,
            }
        )

    def end(self, session: Session | None, error: BaseException | None, now: float) -> None:
        """The call is over, well or not; `now` in seconds of the event loop's clock."""
        metrics.REQUESTS_ACTIVE.add(-1)
        attributes = {semconv.REQUEST_MODEL: self._model}
        if error is not None:
            reason = error.reason if isinstance(error, MeshError) else type(error).__name__
            attributes[semconv.ERROR_TYPE] = reason
            self.span.set_status(trace.StatusCode.ERROR, reason)
            self.span.set_attribute(semconv.ERROR_TYPE, reason)
        metrics.REQUEST_DURATION.record(now - self._arrived, attributes)
        noted = [self._admission] if self._admission is not None else []
        if session is not None:
            self._record_tokens(session, now)
            noted += session.waits
        self.span.end()
        for span in noted:
            span.record(tracer)

    def _record_tokens(self, session: Session, now: float) -> None:
        attributes = {semconv.REQUEST_MODEL: session.model}
        line = session.timeline
        metrics.TOKENS.add(len(session.prompt_ids), {**attributes, semconv.TOKEN_TYPE: "input"})
        metrics.TOKENS.add(session.taken, {**attributes, semconv.TOKEN_TYPE: "output"})
        metrics.QUEUE_TIME.record(line.queue_total, attributes)
        if line.first_token:
            metrics.TIME_TO_FIRST_TOKEN.record(line.first_token - line.arrived, attributes)
            if session.taken > 1:
                per_token = (now - line.first_token) / (session.taken - 1)
                metrics.TIME_PER_OUTPUT_TOKEN.record(per_token, attributes)
        if not self.span.is_recording():
            return
        self.span.set_attributes(
            {
                semconv.OUTPUT_TOKENS: session.taken,
                semconv.ATTEMPT: session.attempt,
                semconv.WORKER: session.worker_id,
                semconv.ENGINE: session.worker_engine,
            }
        )
        if session.terminal is not None:
            reason = inference_pb2.FinishReason.Name(session.terminal).removeprefix("FINISH_REASON_").lower()
            self.span.set_attribute(semconv.RESPONSE_FINISH_REASONS, [reason])


def begin_wait(session: Session, stream: str) -> None:
    """A request goes to its queue, for its first or its next attempt."""
    if not session.span.is_recording():
        return
    wait = NotedSpan(
        session.span,
        f"send {session.model}",
        trace.SpanKind.PRODUCER,
        {
            semconv.MESSAGING_SYSTEM: semconv.MESSAGING_SYSTEM_VALUE,
            semconv.MESSAGING_OPERATION_TYPE: "send",
            semconv.MESSAGING_DESTINATION: stream,
            semconv.MESSAGING_MESSAGE_ID: session.request_id,
            semconv.ATTEMPT: session.attempt,
        },
    )
    session.traceparent, session.tracestate = wait.inject()
    session.waits.append(wait)


def end_wait(session: Session) -> None:
    """A worker has the request, or it is over. Harmless to repeat."""
    if session.waits:
        session.waits[-1].end()
