"""Reads the trace files that the processes of a local mesh write (mesh/trace_files.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh import semconv
from mesh.trace_files import trace_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TAIL_BYTES = 2 << 20
"""Of each file, this much of its end is searched for the newest traces."""

_ERROR_STATUS = 2


@dataclass(frozen=True)
class Event:
    """A moment within a span; time in Unix nanoseconds."""

    name: str
    time_ns: int


@dataclass(frozen=True)
class Span:
    """One span as a file holds it; times in Unix nanoseconds, `parent_id` empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    is_error: bool = False
    message: str = ""

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns

    @property
    def subject(self) -> str:
        """The request or build that it belongs to, if it says so."""
        value = self.attributes.get(semconv.REQUEST_ID) or self.attributes.get(semconv.BUILD) or ""
        return str(value)


@dataclass(frozen=True)
class Trace:
    """All spans of one trace that were found, by start."""

    trace_id: str
    spans: tuple[Span, ...]

    @property
    def start_ns(self) -> int:
        """Where its first span starts."""
        return self.spans[0].start_ns

    @property
    def end_ns(self) -> int:
        """Where its last span ends."""
        return max(span.end_ns for span in self.spans)

    @property
    def subject(self) -> str:
        """The request or build that it follows, if any span says so."""
        return next((span.subject for span in self.spans if span.subject), "")

    @property
    def model(self) -> str:
        """The model asked for, if any span says so."""
        models = (span.attributes.get(semconv.REQUEST_MODEL) for span in self.spans)
        return str(next(filter(None, models), ""))

    def children(self, span_id: str) -> list[Span]:
        """The spans right below one."""
        return [span for span in self.spans if span.parent_id == span_id]

    def roots(self) -> list[Span]:
        """The spans whose parent is not here: none, or a client's."""
        known = {span.span_id for span in self.spans}
        return [span for span in self.spans if span.parent_id not in known]

    @property
    def is_whole(self) -> bool:
        """Whether no span's parent is missing, as it is until every process has written its spans."""
        return [span.parent_id for span in self.roots()] == [""]

    def coverage(self, root: Span) -> float:
        """The share of a span's time in which at least one span below it ran, 0 to 1."""
        covered, reached = 0, root.start_ns
        for span in self._below(root):
            start, end = max(span.start_ns, reached), min(span.end_ns, root.end_ns)
            covered += max(0, end - start)
            reached = max(reached, end)
        return covered / max(1, root.duration_ns)

    def _below(self, root: Span) -> list[Span]:
        found, wanted = [], {root.span_id}
        for span in self.spans:
            if span.parent_id in wanted and span is not root:
                found.append(span)
                wanted.add(span.span_id)
        return found


def load(folder: Path, trace_id: str) -> Trace:
    """One trace, from the files of all processes; without spans if none is found."""
    lines = _lines(folder, needle=trace_id.encode())
    return _group(span for span in _parse(lines) if span.trace_id == trace_id).get(
        trace_id, Trace(trace_id, ())
    )


def find(folder: Path, name: str) -> str | None:
    """The id of the trace of a request id, a build's name, or the beginning of a trace id.

    The newest if there are several; None if no span tells of it.
    """
    name = name.removeprefix("operations/")
    matching = [
        span
        for span in _parse(_lines(folder, needle=name.encode()))
        if span.subject == name or span.trace_id.startswith(name)
    ]
    return max(matching, key=lambda span: span.start_ns).trace_id if matching else None


def recent(folder: Path) -> list[Trace]:
    """The traces at the ends of the files, newest first; those of requests and builds only."""
    found = _group(_parse(_lines(folder, tail_bytes=TAIL_BYTES)))
    traces = [trace for trace in found.values() if trace.subject]
    return sorted(traces, key=lambda trace: trace.start_ns, reverse=True)


def _lines(folder: Path, needle: bytes = b"", tail_bytes: int | None = None) -> Iterator[bytes]:
    for path in trace_files(folder):
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                start = max(0, size - tail_bytes) if tail_bytes else 0
                file.seek(start)
                if start:
                    file.readline()  # the rest of a line that began before
                yield from (line for line in file if needle in line)
        except FileNotFoundError:  # rotated or removed by its process
            continue


def _parse(lines: Iterable[bytes]) -> Iterator[Span]:
    for line in lines:
        if not line.endswith(b"\n"):  # still being written
            continue
        for block in json.loads(line)["resourceSpans"]:
            service = str(_attributes(block["resource"]["attributes"]).get("service.name", ""))
            for scope in block["scopeSpans"]:
                yield from (_span(span, service) for span in scope["spans"])


def _span(data: dict[str, Any], service: str) -> Span:
    return Span(
        trace_id=data["traceId"],
        span_id=data["spanId"],
        parent_id=data.get("parentSpanId", ""),
        name=data["name"],
        service=service,
        start_ns=int(data["startTimeUnixNano"]),
        end_ns=int(data["endTimeUnixNano"]),
        attributes=_attributes(data["attributes"]),
        events=tuple(Event(event["name"], int(event["timeUnixNano"])) for event in data["events"]),
        is_error=data["status"]["code"] == _ERROR_STATUS,
        message=data["status"].get("message", ""),
    )


def _attributes(encoded: list[dict[str, Any]]) -> dict[str, Any]:
    return {item["key"]: _value(item["value"]) for item in encoded}


def _value(encoded: dict[str, Any]) -> Any:
    ((kind, value),) = encoded.items()
    if kind == "intValue":
        return int(value)
    if kind == "arrayValue":
        return [_value(item) for item in value["values"]]
    return value


def _group(spans: Iterable[Span]) -> dict[str, Trace]:
    by_trace: dict[str, list[Span]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    return {
        trace_id: Trace(trace_id, tuple(sorted(members, key=lambda span: (span.start_ns, -span.end_ns))))
        for trace_id, members in by_trace.items()
    }
