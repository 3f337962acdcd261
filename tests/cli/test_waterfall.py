"""Bars stand where their spans ran."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.spans import Event, Span, Trace
from cli.waterfall import draw_bar, milliseconds, print_waterfall
from mesh import semconv

MS = 1_000_000


def _span(name, parent, start_ms, end_ms, service="gateway", **more):
    return Span("abc", name, parent, name, service, start_ms * MS, end_ms * MS, **more)


ROOT = _span("enginemesh.v1.Inference/Generate", "", 0, 100, attributes={semconv.REQUEST_ID: "r1"})
QUEUE = _span("queue", ROOT.span_id, 0, 10)
DECODE = _span("decode", "queue", 10, 100, "infer_worker", events=(Event("gen_ai.first_token", 50 * MS),))
FAILED = _span("fetch", ROOT.span_id, 20, 21, is_error=True, message="refused")
TRACE = Trace("abc", (ROOT, QUEUE, DECODE, FAILED))


def test_bar_spans_its_share_of_the_width():
    assert draw_bar(TRACE, ROOT, 10) == "█" * 10
    assert draw_bar(TRACE, QUEUE, 10) == "██"
    assert draw_bar(TRACE, DECODE, 10) == " ████◆████"


def test_bar_of_a_moment_is_thin():
    assert draw_bar(TRACE, FAILED, 10) == "  ▏"
    assert draw_bar(TRACE, FAILED, 10, is_ascii=True) == "  |"


def test_waterfall_shows_tree_services_events_and_errors():
    console = Console(file=io.StringIO(), width=100)
    print_waterfall(console, TRACE)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["r1", "trace abc · 4 spans, 100.0% covered"]
    assert lines[3].startswith("gateway       Inference/Generate")
    assert "  queue" in lines[4]
    assert lines[5].startswith("infer_worker      decode")
    assert lines[5].endswith("█")
    assert lines[-2].endswith("gen_ai.first_token at 50.0 ms")
    assert lines[-1] == "fetch: refused"
    assert all(len(line) <= 100 for line in lines)


def test_coverage_is_that_of_the_longest_span_with_children():
    call = _span("Builds/CreateBuild", "", 0, 2)
    build = _span("build", call.name, 1, 101, "build_worker")
    stage = _span("convert", "build", 1, 81, "build_worker")
    console = Console(file=io.StringIO(), width=100)
    print_waterfall(console, Trace("abc", (call, build, stage)))
    assert "3 spans, 80.0% covered" in console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_waterfall_fits_any_width(width):
    console = Console(file=io.StringIO(), width=width)
    print_waterfall(console, TRACE)
    assert all(len(line) <= width for line in console.file.getvalue().splitlines())


def test_milliseconds_keep_digits_that_matter():
    assert milliseconds(12_345_678_901) == "12,346 ms"
    assert milliseconds(12_345_678) == "12.3 ms"
    assert milliseconds(12_345) == "0.01 ms"
