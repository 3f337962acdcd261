"""Traces are found in the files of several processes."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from cli import spans
from cli.spans import Span, Trace
from mesh import semconv
from mesh.telemetry import extract, inject
from mesh.trace_files import TraceFileExporter

MS = 1_000_000


def _tracer(folder, service):
    provider = TracerProvider(resource=Resource({"service.name": service}))
    provider.add_span_processor(SimpleSpanProcessor(TraceFileExporter(folder, service, "1")))
    return provider.get_tracer("test")


@pytest.fixture
def folder(tmp_path):
    """Files of a gateway and a worker: two requests, then a span that belongs to neither."""
    gateway, worker = _tracer(tmp_path, "gateway"), _tracer(tmp_path, "infer_worker")
    for name in ("first", "second"):
        span = gateway.start_span("Generate")
        child = worker.start_span("decode", context=extract(*inject(span)))
        child.add_event(semconv.FIRST_TOKEN_EVENT)
        child.end()
        span.set_attributes({semconv.REQUEST_ID: f"req-{name}", semconv.REQUEST_MODEL: "smol"})
        span.end()
    worker.start_span("load").end()
    return tmp_path


def test_find_by_request_id_joins_spans_of_both_processes(folder):
    trace = spans.load(folder, spans.find(folder, "req-first"))
    assert [(span.service, span.name) for span in trace.spans] == [
        ("gateway", "Generate"),
        ("infer_worker", "decode"),
    ]
    assert trace.subject == "req-first"
    assert trace.model == "smol"
    assert trace.spans[1].parent_id == trace.spans[0].span_id
    assert trace.spans[1].events[0].name == semconv.FIRST_TOKEN_EVENT


def test_find_by_beginning_of_trace_id(folder):
    trace_id = spans.find(folder, "req-second")
    assert spans.find(folder, trace_id[:10]) == trace_id


def test_find_of_unknown_request_gives_none(folder):
    assert spans.find(folder, "req-third") is None


def test_recent_lists_newest_first_and_only_requests(folder):
    assert [trace.subject for trace in spans.recent(folder)] == ["req-second", "req-first"]


def test_recent_of_missing_folder_is_empty(tmp_path):
    assert spans.recent(tmp_path / "none") == []


def test_line_that_is_still_being_written_is_left_out(folder):
    with (folder / "gateway-1.jsonl").open("a") as file:
        file.write('{"resourceSpans": [{"req-')
    assert len(spans.recent(folder)) == 2


def _span(span_id, parent_id, start_ms, end_ms):
    return Span("t", span_id, parent_id, span_id, "gateway", start_ms * MS, end_ms * MS)


def test_coverage_counts_overlaps_once_and_sees_gaps():
    root = _span("root", "", 0, 100)
    trace = Trace(
        "t",
        (root, _span("a", "root", 0, 40), _span("b", "a", 20, 50), _span("c", "root", 60, 200)),
    )
    assert trace.coverage(root) == pytest.approx(0.9)


def test_span_of_unknown_parent_is_a_root():
    trace = Trace("t", (_span("a", "the client's", 0, 10), _span("b", "a", 1, 2)))
    assert [span.span_id for span in trace.roots()] == ["a"]


def test_trace_is_whole_once_no_parent_is_missing():
    root, child = _span("root", "", 0, 10), _span("a", "root", 1, 2)
    assert Trace("t", (root, child)).is_whole
    assert not Trace("t", (child,)).is_whole
