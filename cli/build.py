"""`enginemesh build`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.build_progress import follow_all, outcome
from cli.client import CALL_TIMEOUT_S
from cli.failures import EXIT_INTERRUPTED, CommandError
from cli.options import GatewayOption, connect
from cli.tables import bare, size, to_json
from enginemesh.v1 import builds_pb2
from mesh.model_file import ModelFile

if TYPE_CHECKING:
    from google.longrunning import operations_pb2

    from cli.client import Client


def build(
    gateway: GatewayOption,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Model file (YAML).")],
    *,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Hardware to build for, by name (`h100-sxm-80gb`) or as `enginemesh workers` names it; may "
            "be repeated. Default: the model file's targets, else the only one that can be built for."
        ),
    ] = None,
    request_id: Annotated[
        str, typer.Option(help="The same id sent again gives the same build, not a second one.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Check the model file only; build nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the build to its end.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print each result as a line of JSON.")] = False,
) -> None:
    """Compile a model into an engine for each target, as its model file says, and publish it in the store.

    The same build asked for again is answered from the store. What the file says under `serving` takes
    effect at once, whether or not there is anything to build.

    **Examples**

    `enginemesh build examples/models/smollm2-135m-instruct.yaml`

    `enginemesh build my-model.yaml --target h100-sxm-80gb --target l4 --no-wait`
    """
    spec = ModelFile.load(file)
    targets = list(dict.fromkeys(target or spec.targets or [""]))
    with connect(gateway) as client:
        if check or len(targets) > 1:  # of several builds none is begun if one is refused
            for name in targets:
                _create(client, spec, name, validate_only=True)
        if check:
            typer.echo(f"{file}: ok")
            return
        operations = {
            name: _create(client, spec, name, request_id=_request_id(request_id, name, targets))
            for name in targets
        }
        if not wait:
            for operation in operations.values():
                typer.echo(json.dumps(to_json(operation)) if as_json else bare(operation.name))
            return
        try:
            ends = follow_all(client, operations, Console(stderr=True))
        except KeyboardInterrupt:
            names = ", ".join(bare(operation.name) for operation in operations.values())
            raise CommandError(
                f"interrupted; build {names} goes on, `enginemesh builds` shows it", EXIT_INTERRUPTED
            ) from None
    _report(ends, as_json=as_json)


def _create(client: Client, spec: ModelFile, target: str, **more: Any) -> operations_pb2.Operation:
    request = builds_pb2.CreateBuildRequest(spec=spec.to_proto(), target=target, **more)
    return client.builds.CreateBuild(request, timeout=CALL_TIMEOUT_S)


def _request_id(request_id: str, target: str, targets: list[str]) -> str:
    """An id for each of several builds, the same ones whenever the command is given again."""
    return f"{request_id}/{target}" if request_id and len(targets) > 1 else request_id


def _report(ends: dict[str, operations_pb2.Operation], *, as_json: bool) -> None:
    """Prints what each build made.

    Raises:
        CommandError: the first of them that failed; the others are printed nevertheless.
    """
    failure: CommandError | None = None
    for target, operation in ends.items():
        where = f"{target}: " if len(ends) > 1 else ""
        try:
            result = outcome(operation)
        except CommandError as error:
            failure = failure or CommandError(f"{where}{error}", error.status)
        else:
            typer.echo(json.dumps(to_json(result)) if as_json else f"{where}{describe(result)}")
    if failure is not None:
        raise failure


def describe(result: builds_pb2.BuildResult) -> str:
    """What a build made, in one line."""
    how = "was in the store already" if result.cached else "is built and published"
    return f"engine {bare(result.engine, digest=True)} {how} ({size(result.size_bytes)})"
