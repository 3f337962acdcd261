"""`enginemesh build`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import Annotated

import typer
from rich.console import Console

from cli.build_progress import follow
from cli.client import CALL_TIMEOUT_S
from cli.failures import EXIT_INTERRUPTED, CommandError
from cli.options import GatewayOption, connect
from cli.tables import bare, size, to_json
from enginemesh.v1 import builds_pb2
from mesh.model_file import ModelFile


def build(
    gateway: GatewayOption,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Model file (YAML).")],
    *,
    target: Annotated[
        str,
        typer.Option(help="Hardware to build for, as `enginemesh workers` names it. Default: the only one."),
    ] = "",
    request_id: Annotated[
        str, typer.Option(help="The same id sent again gives the same build, not a second one.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Check the model file only; build nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the build to its end.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compile a model into an engine, as its model file says, and publish it in the store.

    The same build asked for again is answered from the store.

    **Examples**

    `enginemesh build examples/models/smollm2-135m-instruct.yaml`

    `enginemesh build my-model.yaml --target sm90-nvidia-h200-141g-cuda12 --no-wait`
    """
    request = builds_pb2.CreateBuildRequest(
        spec=ModelFile.load(file).to_proto(), target=target, request_id=request_id, validate_only=check
    )
    with connect(gateway) as client:
        operation = client.builds.CreateBuild(request, timeout=CALL_TIMEOUT_S)
        if check:
            typer.echo(f"{file}: ok")
            return
        if not wait:
            typer.echo(json.dumps(to_json(operation)) if as_json else bare(operation.name))
            return
        try:
            result = follow(client, operation, Console(stderr=True))
        except KeyboardInterrupt:
            raise CommandError(
                f"interrupted; build {bare(operation.name)} goes on, `enginemesh builds` shows it",
                EXIT_INTERRUPTED,
            ) from None
    typer.echo(json.dumps(to_json(result)) if as_json else describe(result))


def describe(result: builds_pb2.BuildResult) -> str:
    """What a build made, in one line."""
    how = "was in the store already" if result.cached else "is built and published"
    return f"engine {bare(result.engine, digest=True)} {how} ({size(result.size_bytes)})"
