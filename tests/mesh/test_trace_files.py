"""Trace files stay small."""

from __future__ import annotations

import json
import os

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode

from mesh.trace_files import TraceFileExporter, remove_oldest


def _tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


def test_export_bounds_files_of_one_process(tmp_path):
    tracer = _tracer(TraceFileExporter(tmp_path, "gateway", "gw-1", limit_bytes=5000))
    for _ in range(200):
        tracer.start_span("span").end()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) <= {"gateway-gw-1.jsonl", "gateway-gw-1.jsonl.old"}
    assert sum(sizes.values()) < 12_000


def test_export_writes_error_events_and_links(tmp_path):
    tracer = _tracer(TraceFileExporter(tmp_path, "gateway", "gw-1"))
    first = tracer.start_span("first")
    first.end()
    with tracer.start_as_current_span("second") as span:
        span.add_link(first.context, {"why": "moved"})
        span.add_event("gen_ai.first_token", {"at": 1.5, "early": True})
        span.set_status(Status(StatusCode.ERROR, "broken"))
    line = (tmp_path / "gateway-gw-1.jsonl").read_text().splitlines()[-1]
    written = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert written["status"] == {"code": 2, "message": "broken"}
    assert written["links"][0]["spanId"] == f"{first.context.span_id:016x}"
    assert written["events"][0]["name"] == "gen_ai.first_token"
    assert written["events"][0]["attributes"] == [
        {"key": "at", "value": {"doubleValue": 1.5}},
        {"key": "early", "value": {"boolValue": True}},
    ]


def test_export_goes_on_after_file_was_removed(tmp_path):
    tracer = _tracer(TraceFileExporter(tmp_path, "gateway", "gw-1"))
    tracer.start_span("first").end()
    (tmp_path / "gateway-gw-1.jsonl").unlink()
    tracer.start_span("second").end()
    assert "second" in (tmp_path / "gateway-gw-1.jsonl").read_text()


def test_remove_oldest_keeps_newest_within_limit(tmp_path):
    for age, name in enumerate(["new", "middle", "old"]):
        path = tmp_path / f"gateway-{name}.jsonl"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    remove_oldest(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gateway-middle.jsonl",
        "gateway-new.jsonl",
    ]
