"""`enginemesh up`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cli.build import describe
from cli.build_progress import follow
from cli.client import CALL_TIMEOUT_S, POLL_INTERVAL_S
from cli.failures import EXIT_INTERRUPTED, EXIT_REFUSED, CommandError
from cli.interrupts import terminated_like_interrupted, wait_for_interrupt
from cli.local_mesh import LocalMesh, Plan
from cli.options import DataOption, connect
from cli.sample_model import FILE_NAME, fetch_sample_model
from cli.scaling import Scaler
from enginemesh.v1 import builds_pb2
from enginemesh.v1.workers_pb2 import WORKER_ROLE_BUILD
from mesh.model_file import ModelFile
from mesh.settings import GatewaySettings

if TYPE_CHECKING:
    from google.longrunning import operations_pb2

    from cli.client import Client

LOAD_LIMIT_S = 300.0
"""Time for a worker to fetch and load an engine that the store has."""

BUILDER_LIMIT_S = 60.0

SAMPLE_MODEL = ModelFile(
    model="smollm2-135m-instruct",
    kind="openvino",
    source=FILE_NAME,
    precision="int8",
    options={"profile": "exact"},
)
FAKE_MODEL = ModelFile(model="fake", kind="fake")


def _port() -> int:
    return GatewaySettings().port


PortOption = Annotated[
    int,
    typer.Option(
        "--port",
        "-p",
        min=1,
        max=65535,
        default_factory=_port,
        show_default="ENGINEMESH_PORT, or 50051",
        help="Port of the gateway, on 127.0.0.1.",
    ),
]


def up(
    data: DataOption,
    port: PortOption,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True, dir_okay=False, help="Model files: built if the store lacks them, served."
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Serve this model of the store; may be repeated."),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Engine kind of the workers: openvino, or fake for one that only pretends.")
    ] = "openvino",
    workers: Annotated[int, typer.Option("--workers", "-w", min=0, help="Workers for each model.")] = 1,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="Start workers when requests wait, none before, and stop them when there is no work; the "
            "model file sets the limits, else --workers the most.",
        ),
    ] = False,
    logs: Annotated[
        bool, typer.Option("--logs", help="Show what the processes log, also kept in DATA/logs.")
    ] = False,
) -> None:
    """Run a whole mesh on this machine until Ctrl-C: gateway, build worker, inference workers.

    Valkey and an S3 server are started too, unless ENGINEMESH_REDIS_URL and ENGINEMESH_S3_ENDPOINT name
    others. A process that dies is started again. Without a model, a small sample model is built and served.
    With ENGINEMESH_METRICS_PORT, the gateway serves Prometheus there, the others at the ports above.

    **Examples**

    `enginemesh up`

    `enginemesh up my-model.yaml --workers 2`

    `enginemesh up --kind fake --workers 4 --logs`

    `enginemesh up my-model.yaml --scale --workers 2`
    """
    console = Console(stderr=True)
    model_files, roots = choose_models(files or [], model or [], kind, data)
    models = tuple(dict.fromkeys([*(spec.model for spec in model_files), *(model or [])]))
    kinds = ",".join(dict.fromkeys([*(spec.kind for spec in model_files), kind]))
    plan = Plan(data, port, kinds, models, 0 if scale else workers, roots)

    def report(line: str) -> None:
        say(console, line)

    echo = (lambda name, line: say(console, f"{name} │ {line}")) if logs else None
    with terminated_like_interrupted():
        try:
            with LocalMesh(plan, report, echo) as mesh, ExitStack() as scaling:
                if scale:
                    scaling.enter_context(Scaler(mesh, models, workers, report))
                for spec in model_files:
                    build_model(mesh, spec, console)
                if plan.workers:
                    wait_for_models(mesh, models, console)
                say(console, f"The mesh is ready at {mesh.address}; Ctrl-C stops it. Try:")
                say(console, '  enginemesh generate "Why is the sky blue?"')
                wait_for_interrupt()
                say(console, "Stopping; a second Ctrl-C stops at once.")
        except KeyboardInterrupt:
            raise CommandError("interrupted", EXIT_INTERRUPTED) from None


def choose_models(
    files: list[Path], models: list[str], kind: str, data: Path
) -> tuple[list[ModelFile], tuple[Path, ...]]:
    """What to build, and the folders that the build worker may read.

    Without files and models, that is a sample for the engine kind.
    """
    if files:
        return [ModelFile.load(file) for file in files], tuple(file.resolve().parent for file in files)
    if models:
        return [], ()
    if kind == FAKE_MODEL.kind:
        return [FAKE_MODEL], ()
    if kind != SAMPLE_MODEL.kind:
        raise CommandError(f"no sample model for kind {kind}: name a model file or --model", EXIT_REFUSED)
    return [SAMPLE_MODEL], (fetch_sample_model(data / "sources").parent,)


def build_model(mesh: LocalMesh, spec: ModelFile, console: Console) -> builds_pb2.BuildResult:
    """Has an engine of the model for this machine in the store when it returns."""
    with connect(mesh.address) as client:
        operation = _create(client, spec)
        result = follow(client, operation, console)
    say(console, f"{spec.model}: {describe(result)}")
    return result


def wait_for_models(mesh: LocalMesh, models: tuple[str, ...], console: Console) -> None:
    """Returns when each model has a worker that takes requests."""
    for name in models:
        with console.status(f"A worker loads {name}"):
            mesh.wait_until_serving(name, LOAD_LIMIT_S)


def say(console: Console, line: str) -> None:
    """Prints a line as it is, around a progress bar if there is one."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _create(client: Client, spec: ModelFile) -> operations_pb2.Operation:
    """Asks for a build as soon as a build worker of this mesh can be given it."""
    deadline = time.monotonic() + BUILDER_LIMIT_S
    while not any(
        worker.role == WORKER_ROLE_BUILD and spec.kind in worker.kinds for worker in client.workers()
    ):
        if time.monotonic() > deadline:
            raise CommandError(f"no build worker for kind {spec.kind} after {BUILDER_LIMIT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)
    request = builds_pb2.CreateBuildRequest(spec=spec.to_proto())
    return client.builds.CreateBuild(request, timeout=CALL_TIMEOUT_S)
