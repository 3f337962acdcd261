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

ENVIRONMENT_FILE = "mesh.env"
"""In the data folder of a mesh that `enginemesh up` runs: what other processes need to join it."""


def local_settings(data_dir: Path | None = None) -> ClientSettings:
    """The settings of a command: the environment's, then those of the mesh that runs in the data folder."""
    data_dir = data_dir or ClientSettings().data_dir
    return ClientSettings(_env_file=data_dir / ENVIRONMENT_FILE, data_dir=data_dir)


def _gateway() -> str:
    return local_settings().gateway


def _data_dir() -> Path:
    return ClientSettings().data_dir


GatewayOption = Annotated[
    str,
    typer.Option(
        "--gateway",
        "-g",
        default_factory=_gateway,
        show_default="ENGINEMESH_GATEWAY, or the local mesh's",
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
