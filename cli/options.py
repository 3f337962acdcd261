"""Options that several commands share."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import grpc
import typer

from cli.client import Client
from cli.failures import from_rpc
from mesh.settings import ClientSettings

if TYPE_CHECKING:
    from collections.abc import Iterator


def _gateway() -> str:
    return ClientSettings().gateway


def _data_dir() -> Path:
    return ClientSettings().data_dir


GatewayOption = Annotated[
    str,
    typer.Option(
        "--gateway",
        "-g",
        default_factory=_gateway,
        show_default="ENGINEMESH_GATEWAY, or 127.0.0.1:50051",
        help="host:port of the gateway to talk to.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]

DataOption = Annotated[
    Path,
    typer.Option(
        "--data",
        default_factory=_data_dir,
        show_default="ENGINEMESH_DATA_DIR, or .data",
        file_okay=False,
        help="Folder of the local mesh: engines, traces, logs, Valkey's and the S3 server's files.",
    ),
]


@contextmanager
def connect(gateway: str) -> Iterator[Client]:
    """A client of that gateway; what a call ends with is raised as CommandError."""
    with Client(gateway, ClientSettings().max_message_bytes) as client:
        try:
            yield client
        except grpc.RpcError as error:
            raise from_rpc(error, gateway) from error
