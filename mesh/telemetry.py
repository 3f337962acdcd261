"""Sets up OpenTelemetry in a process, and carries a trace from one process to the next.

Spans and metrics go to an OTLP endpoint if one is set by the standard variables
(OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT).
Without one, spans go to a file that `enginemesh trace` reads, and metrics only to the Prometheus endpoint.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from threading import Thread
from typing import TYPE_CHECKING

import prometheus_client
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from mesh.trace_files import TraceFileExporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from wsgiref.simple_server import WSGIServer

    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.trace import Span, Tracer

    from mesh.settings import MeshSettings

FILE_DELAY_MS = 300
"""Spans reach the trace file this long after they end, at most."""

SHUTDOWN_LIMIT_S = 3.0

_next_span_id: ContextVar[int] = ContextVar("next_span_id", default=0)
_propagator = TraceContextTextMapPropagator()
_ids = RandomIdGenerator()


@dataclass(frozen=True)
class Telemetry:
    """A process's providers; `shutdown` sends what they still hold."""

    tracer_provider: TracerProvider
    meter_provider: MeterProvider | None
    stop_metrics_server: Callable[[], None] | None

    def shutdown(self) -> None:
        """Sends what is left and stops; call once, last. Takes SHUTDOWN_LIMIT_S at most.

        A collector that does not answer must not hold up the end of a process, and the providers' own
        shutdown retries for longer than that.
        """
        tasks: list[Callable[[], None]] = [self.tracer_provider.shutdown]
        if self.meter_provider is not None:
            tasks.append(self.meter_provider.shutdown)
        if self.stop_metrics_server is not None:
            tasks.append(self.stop_metrics_server)
        threads = [Thread(target=task, daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + SHUTDOWN_LIMIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def configure(settings: MeshSettings, service_name: str, instance_id: str) -> Telemetry:
    """Makes this process's providers and sets them as the global ones.

    Args:
        settings: Sampling ratio, data folder, metrics port.
        service_name: "gateway", "infer_worker" or "build_worker".
        instance_id: The name that tells this process from others of its service.

    Raises:
        OSError: the metrics port is taken, or the trace folder cannot be made.
    """
    resource = Resource.create(
        {
            "service.namespace": "enginemesh",
            "service.name": service_name,
            "service.instance.id": instance_id,
            "service.version": version("enginemesh"),
            "host.name": platform.node(),
            "process.pid": os.getpid(),
        }
    )
    tracer_provider = TracerProvider(
        resource=resource,
        sampler=ParentBased(TraceIdRatioBased(settings.trace_sample_ratio)),
        id_generator=SpanIds(),
        shutdown_on_exit=False,
    )
    if _has_otlp_endpoint("TRACES"):
        tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    else:
        exporter = TraceFileExporter(settings.data_dir / "traces", service_name, instance_id)
        tracer_provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=FILE_DELAY_MS))
    trace.set_tracer_provider(tracer_provider)

    readers: list[MetricReader] = []
    stop_metrics_server = None
    if _has_otlp_endpoint("METRICS"):
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    if settings.metrics_port:
        reader, stop_metrics_server = _prometheus(settings.metrics_port)
        readers.append(reader)
    meter_provider = None
    if readers:  # without a reader the API's own no-op instruments cost nothing
        meter_provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        metrics.set_meter_provider(meter_provider)
    return Telemetry(tracer_provider, meter_provider, stop_metrics_server)


def flush() -> None:
    """Sends the spans that have ended, within SHUTDOWN_LIMIT_S; for those that must outlive this process.

    Exporters wait for more of them otherwise, seconds by the standard's default.
    """
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.force_flush(round(SHUTDOWN_LIMIT_S * 1000))


def inject(where: Span | Context | None = None) -> tuple[str, str]:
    """The W3C (traceparent, tracestate) of a span or context; of the current one if none is given.

    Both are empty outside any span; tracestate is empty in most traces.
    """
    context = trace.set_span_in_context(where) if isinstance(where, trace.Span) else where
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier.get("traceparent", ""), carrier.get("tracestate", "")


def extract(traceparent: str, tracestate: str = "") -> Context:
    """The context to start spans in, from what `inject` gave elsewhere.

    What is empty or malformed gives an empty context, so that the next span starts a new trace.
    """
    # A context is given on purpose: with none, the current span would become the parent.
    return _propagator.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


class NotedSpan:
    """A span of which only the times are noted while it lasts; `record` makes it later.

    Its id is there from the beginning, so that others can hang below it. Making a span costs about as much
    as sending a request on its way, and this takes it out of the way of the first token.

    Args:
        parent: The span that it belongs below, which is recorded.
        name: Its name.
        kind: Its kind.
        attributes: What is known of it.
    """

    __slots__ = ("_attributes", "_end_ns", "_kind", "_name", "_parent", "_span_id", "_start_ns")

    def __init__(
        self,
        parent: Span,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, str | int] | None = None,
    ) -> None:
        self._parent = parent
        self._name = name
        self._kind = kind
        self._attributes = attributes
        self._span_id = _ids.generate_span_id()
        self._start_ns = time.time_ns()
        self._end_ns = 0

    def inject(self) -> tuple[str, str]:
        """Its W3C (traceparent, tracestate)."""
        parent = self._parent.get_span_context()
        own = SpanContext(parent.trace_id, self._span_id, False, parent.trace_flags, parent.trace_state)
        return inject(trace.set_span_in_context(trace.NonRecordingSpan(own), Context()))

    def end(self) -> None:
        """Notes that it ends now; the first call counts."""
        self._end_ns = self._end_ns or time.time_ns()

    def record(self, tracer: Tracer) -> None:
        """Makes the span; one that has not ended ends now."""
        self.end()
        parent = trace.set_span_in_context(self._parent, Context())
        with _span_id(self._span_id):
            span = tracer.start_span(
                self._name, parent, self._kind, self._attributes, start_time=self._start_ns
            )
        span.end(self._end_ns)


def end_lost_span(
    tracer: Tracer,
    name: str,
    lost: SpanContext,
    parent: Context,
    *,
    start_ns: int,
    attributes: Mapping[str, str | int],
    reason: str,
) -> None:
    """Ends, at this moment, a span whose process died, so that those below it have their place in the trace.

    Args:
        tracer: Of a provider that `configure` made; under another one the span gets a new id.
        name: As it had.
        lost: Its ids.
        parent: Context of its parent, in the same trace.
        start_ns: When it began, in Unix nanoseconds.
        attributes: What is known of it.
        reason: What became of it.
    """
    with _span_id(lost.span_id):
        span = tracer.start_span(name, parent, SpanKind.CONSUMER, attributes, start_time=start_ns)
    span.set_status(StatusCode.ERROR, reason)
    span.end()


class SpanIds(RandomIdGenerator):
    """Random ids, except for a span whose id is known: it was noted, or begun by a process that died."""

    @override
    def generate_span_id(self) -> int:
        return _next_span_id.get() or super().generate_span_id()


@contextmanager
def _span_id(span_id: int) -> Iterator[None]:
    """Whatever span is started inside gets this id."""
    token = _next_span_id.set(span_id)
    try:
        yield
    finally:
        _next_span_id.reset(token)


def _has_otlp_endpoint(signal: str) -> bool:
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return any(os.environ.get(name) for name in names)


def _prometheus(port: int) -> tuple[MetricReader, Callable[[], None]]:
    registry = prometheus_client.CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry)
    server: WSGIServer
    server, thread = prometheus_client.start_http_server(port, addr="127.0.0.1", registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return reader, stop
