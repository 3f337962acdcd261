"""The `enginemesh` command: one module for each of its commands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from cli.build import build
from cli.builds import builds, builds_group
from cli.chaos import chaos
from cli.delete import delete
from cli.demo import demo
from cli.diff import diff
from cli.doctor import doctor
from cli.engines import engines
from cli.export import export
from cli.failures import CommandError, from_mesh
from cli.gc import gc
from cli.generate import generate
from cli.import_engine import import_engine
from cli.init import init
from cli.keys import keys_group
from cli.models import models
from cli.plan import plan
from cli.reindex import reindex
from cli.targets import targets
from cli.trace import trace
from cli.up import up
from cli.verify import verify
from cli.workers import workers
from mesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

EPILOG = """\
**Exit status**: 0 done, 1 failed, 2 the request is wrong, 3 the mesh cannot serve it now (try again),
4 the mesh is not in the state that the call needs, 130 interrupted.
"""

app = typer.Typer(
    name="enginemesh",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve large language models over gRPC on a fleet of unlike GPUs, with an engine compiled for each.",
    epilog=EPILOG,
)
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run": (demo, up),
    "Use": (init, plan, build, generate),
    "Keep engines": (import_engine, export, verify, diff, delete, gc, reindex),
    "Measure and break": (chaos,),
    "Look around": (models, engines, workers, builds, targets, trace, doctor),
}
GROUPS = {builds: builds_group}
"""Commands that have commands of their own."""

NAMES = {import_engine: "import"}
"""Commands whose names Python keeps for itself."""

for panel, commands in COMMANDS.items():
    for command in commands:
        if command in GROUPS:
            app.add_typer(GROUPS[command], rich_help_panel=panel)
        else:
            app.command(NAMES.get(command), rich_help_panel=panel)(command)
app.add_typer(keys_group, rich_help_panel="Keep engines")


def run() -> None:
    """Runs the command line; errors become one line on standard error and an exit status."""
    try:
        app()
    except MeshError as error:
        _end(from_mesh(error))
    except CommandError as error:
        _end(error)


def _end(error: CommandError) -> None:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(str(error), err=True)
    sys.exit(error.status)


if __name__ == "__main__":
    run()
