"""Spans and metrics leave the process, and one trace spans several."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent import futures

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cli.embedded import free_port
from mesh.telemetry import SHUTDOWN_LIMIT_S, extract, inject

# Providers are global to a process and set once, so each case runs in one of its own.
PROGRAM = """
import sys
from opentelemetry import trace
from mesh import metrics, telemetry
from mesh.settings import MeshSettings

telemetry_handle = telemetry.configure(MeshSettings(), "gateway", "gw-1")
with trace.get_tracer("test").start_as_current_span("outer", attributes={"n": 3, "list": ["a", "b"]}):
    with trace.get_tracer("test").start_as_current_span("inner"):
        pass
metrics.REQUEST_DURATION.record(0.004)
metrics.SLOTS_USED.set(5)
print("ready", flush=True)
sys.stdin.readline()
telemetry_handle.shutdown()
"""


@pytest.fixture
def program(tmp_path):
    """Starts PROGRAM with more environment; it stops when its standard input is closed."""
    started = []

    def start(**environment):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"ENGINEMESH_DATA_DIR": str(tmp_path), "PATH": "/usr/bin", **environment},
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _spans(folder):
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [
        (span, block["resource"])
        for line in lines
        for block in json.loads(line)["resourceSpans"]
        for scope in block["scopeSpans"]
        for span in scope["spans"]
    ]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it."""

    def __init__(self):
        self.names = []

    def Export(self, request, context):  # noqa: N802 -- gRPC's name
        for block in request.resource_spans:
            for scope in block.scope_spans:
                self.names += [span.name for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_configure_without_endpoint_writes_otlp_json_file(program, tmp_path):
    program().communicate(timeout=30)
    spans = _spans(tmp_path / "traces")
    inner, outer = (span for span, _ in spans)
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert inner["parentSpanId"] == outer["spanId"]
    assert inner["traceId"] == outer["traceId"]
    assert outer["attributes"] == [
        {"key": "n", "value": {"intValue": "3"}},
        {
            "key": "list",
            "value": {"arrayValue": {"values": [{"stringValue": "a"}, {"stringValue": "b"}]}},
        },
    ]
    resource = {item["key"]: item["value"] for item in spans[0][1]["attributes"]}
    assert resource["service.name"] == {"stringValue": "gateway"}
    assert resource["service.instance.id"] == {"stringValue": "gw-1"}


def test_configure_without_endpoint_writes_spans_while_running(program, tmp_path):
    program()
    deadline = time.monotonic() + 20
    while not _spans(tmp_path / "traces"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_configure_with_endpoint_exports_there_and_writes_no_file(program, tmp_path):
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    endpoint = f"http://127.0.0.1:{port}"
    process = program(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint)
    process.communicate(timeout=30)
    server.stop(None).wait()
    assert collector.names == ["inner", "outer"]
    assert not (tmp_path / "traces").exists()


def test_shutdown_with_dead_endpoint_ends_soon(program):
    process = program(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    started = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert time.monotonic() - started < SHUTDOWN_LIMIT_S + 5


def test_sample_ratio_zero_records_nothing(program, tmp_path):
    program(ENGINEMESH_TRACE_SAMPLE_RATIO="0").communicate(timeout=30)
    assert _spans(tmp_path / "traces") == []


def test_metrics_port_serves_prometheus_on_loopback_only(program):
    port = free_port()
    program(ENGINEMESH_METRICS_PORT=str(port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "gen_ai_server_request_duration_seconds_bucket" in text
    assert 'le="0.005"' in text
    assert "enginemesh_slots_used" in text
    elsewhere = socket.gethostbyname(socket.gethostname())
    if elsewhere != "127.0.0.1":
        with socket.socket() as probe:
            assert probe.connect_ex((elsewhere, port)) != 0


@pytest.fixture
def tracer():
    """A tracer that keeps its spans, beside the global one."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    tracer.exporter = exporter
    return tracer


def test_consumer_span_has_producer_as_parent(tracer):
    # Field case 35: what crosses the queue must not become a root.
    with tracer.start_as_current_span("publish") as producer:
        traceparent, tracestate = inject()
    consumer = tracer.start_span("process", context=extract(traceparent, tracestate))
    assert consumer.parent.span_id == producer.context.span_id
    assert consumer.context.trace_id == producer.context.trace_id
    assert consumer.parent.is_remote


def test_inject_takes_span_that_is_not_current(tracer):
    span = tracer.start_span("held by a session")
    traceparent, tracestate = inject(span)
    assert traceparent.startswith(f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-")
    assert tracestate == ""
    assert inject() == ("", "")
    assert inject(trace.set_span_in_context(span)) == (traceparent, "")


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_extract_of_malformed_parent_starts_new_trace(tracer, traceparent):
    with tracer.start_as_current_span("must not be the parent"):
        span = tracer.start_span("root", context=extract(traceparent))
    assert span.parent is None


def test_unsampled_parent_stays_unsampled_downstream(tracer):
    context = extract("00-" + "1" * 32 + "-" + "2" * 16 + "-00")
    span = tracer.start_span("child", context=context)
    assert not span.is_recording()
