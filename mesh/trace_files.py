"""Traces as files: the exporter that every process uses when no OTLP endpoint is set.

One line is one OTLP/JSON `TracesData`, as the collector's otlpjsonfile receiver reads it
(https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/), so a file can be sent on later.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

FILE_LIMIT_BYTES = 16 << 20
"""A file that has reached this is set aside as the one old file of its process."""

FOLDER_LIMIT_BYTES = 128 << 20
"""Files of all processes together, checked when a process starts; the oldest go first."""

SCOPE = "enginemesh"

_KINDS = {
    SpanKind.INTERNAL: 1,
    SpanKind.SERVER: 2,
    SpanKind.CLIENT: 3,
    SpanKind.PRODUCER: 4,
    SpanKind.CONSUMER: 5,
}
_STATUS = {StatusCode.UNSET: 0, StatusCode.OK: 1, StatusCode.ERROR: 2}

_log = logging.getLogger(__name__)


class TraceFileExporter(SpanExporter):
    """Appends spans to `<folder>/<service>-<instance>.jsonl`, at most twice `limit_bytes` on disk.

    Args:
        folder: Made if absent; shared by all processes of one mesh.
        service: What kind of process this is.
        instance: Which one.
        limit_bytes: Size at which the file becomes `….jsonl.old`, in place of the one before.
    """

    def __init__(
        self, folder: Path, service: str, instance: str, limit_bytes: int = FILE_LIMIT_BYTES
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_oldest(folder, FOLDER_LIMIT_BYTES)
        self._path = folder / f"{service}-{instance}.jsonl"
        self._limit_bytes = limit_bytes

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            # Opened anew each time: another process may have removed the file as one of the oldest.
            with self._path.open("ab") as file:
                file.write(_to_line(spans))
                is_full = file.tell() >= self._limit_bytes
            if is_full:
                self._path.replace(self._path.with_suffix(".jsonl.old"))
        except OSError as error:
            _log.warning("spans lost: %s", error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


def remove_oldest(folder: Path, limit_bytes: int) -> None:
    """Deletes the trace files that were written to longest ago until the rest fits `limit_bytes`."""
    files = []
    for path in trace_files(folder):
        try:
            status = path.stat()
        except FileNotFoundError:  # rotated or removed by another process
            continue
        files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def trace_files(folder: Path) -> list[Path]:
    """Every trace file of every process in `folder`."""
    return [*folder.glob("*.jsonl"), *folder.glob("*.jsonl.old")]


def _to_line(spans: Sequence[ReadableSpan]) -> bytes:
    by_resource: dict[int, tuple[Resource, list[dict[str, Any]]]] = {}
    for span in spans:
        resource = span.resource
        by_resource.setdefault(id(resource), (resource, []))[1].append(_encode_span(span))
    data = {
        "resourceSpans": [
            {
                "resource": {"attributes": _encode_attributes(resource.attributes)},
                "scopeSpans": [{"scope": {"name": SCOPE}, "spans": encoded}],
            }
            for resource, encoded in by_resource.values()
        ]
    }
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _encode_span(span: ReadableSpan) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        **_encode_context(span.context),
        "name": span.name,
        "kind": _KINDS[span.kind],
        # 64-bit numbers are strings in protobuf's JSON.
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _encode_attributes(span.attributes),
        "events": [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": _encode_attributes(event.attributes),
            }
            for event in span.events
        ],
        "links": [
            {**_encode_context(link.context), "attributes": _encode_attributes(link.attributes)}
            for link in span.links
        ],
        "status": {"code": _STATUS[span.status.status_code]},
    }
    if span.parent is not None:
        encoded["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.status.description:
        encoded["status"]["message"] = span.status.description
    return encoded


def _encode_context(context: SpanContext) -> dict[str, Any]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _encode_attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _encode_value(value)} for key, value in (attributes or {}).items()]


def _encode_value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_encode_value(item) for item in value]}}
    return {"stringValue": str(value)}
