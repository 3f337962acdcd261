"""Follows a build to its end and shows how far it is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cli.failures import from_status
from cli.tables import enum_word
from enginemesh.v1 import builds_pb2
from mesh.build_operation import metadata_of, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from google.longrunning import operations_pb2
    from rich.console import Console

    from cli.client import Client

    Show = Callable[[str, builds_pb2.BuildMetadata], None]
    """Told the label of a build, and its state."""


def follow(client: Client, operation: operations_pb2.Operation, console: Console) -> builds_pb2.BuildResult:
    """Waits for the end of a build, with a bar on a terminal and a line for each stage elsewhere.

    Raises:
        CommandError: the build failed or was cancelled.
        grpc.RpcError: the gateway went away; the build goes on.
    """
    return outcome(follow_all(client, {"": operation}, console)[""])


def follow_all(
    client: Client, operations: Mapping[str, operations_pb2.Operation], console: Console
) -> dict[str, operations_pb2.Operation]:
    """Waits for the end of several builds at once, each shown as `follow` does.

    Args:
        client: Calls their gateway.
        operations: By the label that each is shown with.
        console: Where.

    Returns:
        How each ended.

    Raises:
        grpc.RpcError: the gateway went away; the builds go on.
    """
    if all(operation.done for operation in operations.values()):
        return dict(operations)
    shown = _bars(console, operations) if console.is_terminal else _lines(console, operations)
    with shown as show, ThreadPoolExecutor(len(operations)) as pool:
        watches = {
            label: client.builds.WatchBuild(builds_pb2.WatchBuildRequest(name=operation.name))
            for label, operation in operations.items()
        }
        ends = {label: pool.submit(_watch, label, watch, show) for label, watch in watches.items()}
        try:
            return {label: end.result() for label, end in ends.items()}
        except BaseException:  # an interrupt too: else the pool would wait for the builds
            for watch in watches.values():
                watch.cancel()
            raise


def outcome(operation: operations_pb2.Operation) -> builds_pb2.BuildResult:
    """What an ended build made.

    Raises:
        CommandError: it failed or was cancelled.
    """
    if operation.HasField("error"):
        raise from_status(operation.error)
    return result_of(operation)


def _watch(label: str, states: Iterable[operations_pb2.Operation], show: Show) -> operations_pb2.Operation:
    """The last of the states, each of which is shown; a watch gives one at least."""
    for state in states:
        show(label, metadata_of(state))
    return state


@contextmanager
def _bars(console: Console, labels: Iterable[str]) -> Iterator[Show]:
    columns = (
        TextColumn("{task.fields[label]}", markup=False),
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=32),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="bright_black", markup=False),
    )
    with Progress(*(columns if any(labels) else columns[1:]), console=console) as progress:
        tasks = {label: progress.add_task("queued", total=100, detail="", label=label) for label in labels}

        def show(label: str, metadata: builds_pb2.BuildMetadata) -> None:
            progress.update(
                tasks[label],
                description=stage_word(metadata),
                completed=metadata.progress_percent,
                detail=metadata.detail,
            )

        yield show


@contextmanager
def _lines(console: Console, labels: Iterable[str]) -> Iterator[Show]:
    begin = time.monotonic()
    stages = dict.fromkeys(labels, "")
    width = max(map(len, stages))
    gap = "  " if width else ""

    def show(label: str, metadata: builds_pb2.BuildMetadata) -> None:
        stage = stage_word(metadata)
        if stage != stages[label]:
            stages[label] = stage
            seconds = time.monotonic() - begin
            where = f"{label:<{width}}{gap}"
            line = f"{seconds:6.1f} s  {where}{metadata.progress_percent:3} %  {stage:<9} {metadata.detail}"
            console.print(line, highlight=False, markup=False)

    yield show


def stage_word(metadata: builds_pb2.BuildMetadata) -> str:
    """The stage of a build for people."""
    return enum_word(builds_pb2.BuildStage.Name(metadata.stage), "BUILD_STAGE_")
