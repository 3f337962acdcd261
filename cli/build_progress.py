"""Follows a build to its end and shows how far it is."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cli.failures import from_status
from cli.tables import enum_word
from enginemesh.v1 import builds_pb2
from mesh.build_operation import metadata_of, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.longrunning import operations_pb2
    from rich.console import Console

    from cli.client import Client

    Show = Callable[[builds_pb2.BuildMetadata], None]


def follow(client: Client, operation: operations_pb2.Operation, console: Console) -> builds_pb2.BuildResult:
    """Waits for the end of a build, with a bar on a terminal and a line for each stage elsewhere.

    Raises:
        CommandError: the build failed or was cancelled.
        grpc.RpcError: the gateway went away; the build goes on.
    """
    if not operation.done:
        with _bar(console) if console.is_terminal else _lines(console) as show:
            show(metadata_of(operation))
            for latest in client.builds.WatchBuild(builds_pb2.WatchBuildRequest(name=operation.name)):
                operation = latest
                show(metadata_of(operation))
    if operation.HasField("error"):
        raise from_status(operation.error)
    return result_of(operation)


@contextmanager
def _bar(console: Console) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=32),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="bright_black", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("queued", total=100, detail="")

        def show(metadata: builds_pb2.BuildMetadata) -> None:
            progress.update(
                task,
                description=stage_word(metadata),
                completed=metadata.progress_percent,
                detail=metadata.detail,
            )

        yield show


@contextmanager
def _lines(console: Console) -> Iterator[Show]:
    begin = time.monotonic()
    shown = ""

    def show(metadata: builds_pb2.BuildMetadata) -> None:
        nonlocal shown
        stage = stage_word(metadata)
        if stage != shown:
            shown = stage
            seconds = time.monotonic() - begin
            line = f"{seconds:6.1f} s  {metadata.progress_percent:3} %  {stage:<9} {metadata.detail}"
            console.print(line, highlight=False, markup=False)

    yield show


def stage_word(metadata: builds_pb2.BuildMetadata) -> str:
    """The stage of a build for people."""
    return enum_word(builds_pb2.BuildStage.Name(metadata.stage), "BUILD_STAGE_")
