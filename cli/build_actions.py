"""What `enginemesh builds` does with one build: its log, its progress, its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import grpc
import typer
from google.longrunning import operations_pb2
from rich.console import Console

from cli.build import describe
from cli.build_progress import follow
from cli.client import CALL_TIMEOUT_S
from cli.failures import is_not_found
from cli.options import GatewayOption, connect
from enginemesh.v1 import builds_pb2

if TYPE_CHECKING:
    from cli.client import Client

FOLLOW_INTERVAL_S = 1.0
OVERLAP_CHARACTERS = 200

BuildArgument = Annotated[
    str, typer.Argument(metavar="BUILD", help="A build, as `enginemesh builds` names it.", show_default=False)
]


def log(
    gateway: GatewayOption,
    build: Annotated[
        str,
        typer.Argument(
            metavar="BUILD", help="A build, or engines/DIGEST for the build that made it.", show_default=False
        ),
    ],
    *,
    keep_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the build has ended.")] = False,
) -> None:
    """Print what the tools of a build said, also while it runs and after it failed."""
    name = _operation(build)
    with connect(gateway) as client:
        if keep_on and name.startswith("operations/"):
            _follow_log(client, name)
        else:
            typer.echo(_read_log(client, name), nl=False)


def watch(gateway: GatewayOption, build: BuildArgument) -> None:
    """Follow a build to its end."""
    with connect(gateway) as client:
        request = operations_pb2.GetOperationRequest(name=_operation(build))
        operation = client.operations.GetOperation(request, timeout=CALL_TIMEOUT_S)
        typer.echo(describe(follow(client, operation, Console(stderr=True))))


def cancel(gateway: GatewayOption, build: BuildArgument) -> None:
    """End a build; what it has half made is removed. Its end may take a moment."""
    with connect(gateway) as client:
        request = operations_pb2.CancelOperationRequest(name=_operation(build))
        client.operations.CancelOperation(request, timeout=CALL_TIMEOUT_S)


def delete(gateway: GatewayOption, build: BuildArgument) -> None:
    """Forget a build that has ended, and its log. Its engine stays."""
    with connect(gateway) as client:
        request = operations_pb2.DeleteOperationRequest(name=_operation(build))
        client.operations.DeleteOperation(request, timeout=CALL_TIMEOUT_S)


def _operation(build: str) -> str:
    return build if "/" in build else f"operations/{build}"


def _read_log(client: Client, name: str) -> str:
    request = builds_pb2.GetBuildLogRequest(name=name)
    return str(client.builds.GetBuildLog(request, timeout=CALL_TIMEOUT_S).text)


def _follow_log(client: Client, name: str) -> None:
    shown = ""
    has_ended = False
    while True:
        try:
            text = _read_log(client, name)
        except grpc.RpcError as error:
            if has_ended or not is_not_found(error):
                raise
            text = ""  # nothing is stored before the build has begun
        typer.echo(new_part(shown, text), nl=False)
        shown = text
        if has_ended:
            return
        # Looked at before the log is read once more, so that its last lines are shown.
        request = operations_pb2.GetOperationRequest(name=name)
        has_ended = client.operations.GetOperation(request, timeout=CALL_TIMEOUT_S).done
        if not has_ended:
            time.sleep(FOLLOW_INTERVAL_S)


def new_part(shown: str, text: str) -> str:
    """What of a log was not shown yet; of a log that has lost its middle meanwhile, too."""
    if text.startswith(shown):
        return text[len(shown) :]
    overlap = shown[-OVERLAP_CHARACTERS:]
    at = text.rfind(overlap)
    return text if at < 0 else text[at + len(overlap) :]
