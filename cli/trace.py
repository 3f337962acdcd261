"""`enginemesh trace`."""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli import spans
from cli.failures import EXIT_REFUSED, CommandError
from cli.options import DataOption, JsonOption  # noqa: TC001 -- typer reads annotations when it runs
from cli.tables import print_table, stdout_console
from cli.waterfall import milliseconds, print_waterfall

if TYPE_CHECKING:
    from pathlib import Path


def trace(
    data: DataOption,
    request: Annotated[
        str,
        typer.Argument(help="A request id, a build, or the beginning of a trace id. Default: the newest."),
    ] = "",
    *,
    list_recent: Annotated[bool, typer.Option("--list", "-l", help="List the newest traces.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Traces to list.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of a request or a build went, from the local mesh's trace files.

    **Examples**

    `enginemesh trace`  follows the newest request

    `enginemesh trace --list`

    `enginemesh trace req-5f2c --json | jq .[].name`
    """
    folder = data / "traces"
    if list_recent:
        _list(spans.recent(folder)[:count], as_json=as_json)
        return
    found = spans.load(folder, _choose(folder, request))
    if as_json:
        print(json.dumps([dataclasses.asdict(span) for span in found.spans], indent=2))
    else:
        print_waterfall(stdout_console(), found)


def _choose(folder: Path, request: str) -> str:
    if request:
        trace_id = spans.find(folder, request)
        if trace_id is None:
            raise CommandError(
                f"no trace of {request!r} in {folder}; `enginemesh trace --list` shows the newest",
                EXIT_REFUSED,
            )
        return trace_id
    newest = spans.recent(folder)[:1]
    if not newest:
        raise CommandError(_why_none(folder), EXIT_REFUSED)
    return newest[0].trace_id


def _why_none(folder: Path) -> str:
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return "traces go to OTEL_EXPORTER_OTLP_ENDPOINT; look there"
    return f"no traces in {folder}; name the mesh's folder with --data, or send a request first"


def _list(traces: list[spans.Trace], *, as_json: bool) -> None:
    if as_json:
        keys = ("trace_id", "subject", "model", "start_ns", "end_ns")
        rows = [{**{key: getattr(found, key) for key in keys}, "spans": len(found.spans)} for found in traces]
        print(json.dumps(rows, indent=2))
        return
    print_table(
        ("started", "request or build", "model", "took>", "spans>", "trace"),
        (
            (
                f"{datetime.fromtimestamp(found.start_ns / 1e9).astimezone():%H:%M:%S}",
                found.subject,
                found.model,
                milliseconds(found.end_ns - found.start_ns),
                str(len(found.spans)),
                found.trace_id,
            )
            for found in traces
        ),
        "No traces yet.",
    )
