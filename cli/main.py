"""The `enginemesh` command: one module for each of its commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import typer
import typer.main
from typer.core import TyperGroup

from cli.failures import CommandError, from_mesh
from mesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

EPILOG = """\
**Exit status**: 0 done, 1 failed, 2 the request is wrong, 3 the mesh cannot serve it now (try again),
4 the mesh is not in the state that the call needs, 130 interrupted.
"""

PANELS = {
    "Run": ("demo", "up"),
    "Use": ("init", "plan", "build", "generate"),
    "Keep engines": ("import", "export", "verify", "diff", "delete", "gc", "reindex", "keys"),
    "Measure and break": ("chaos",),
    "Look around": ("models", "engines", "workers", "builds", "targets", "trace", "doctor"),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}

GROUPS = ("builds", "keys")
"""Commands that have commands of their own: `<name>_group` in their module."""

MODULES = {"import": "import_engine"}
"""Commands whose names Python keeps for itself; every other is the function of its name in its module."""


class LazyCommands(Mapping[str, Any]):
    """Every command by name, in the order of the help. Looking at one imports its module, and no other."""

    def __iter__(self) -> Iterator[str]:
        return iter(PANEL_OF)

    def __len__(self) -> int:
        return len(PANEL_OF)

    def __getitem__(self, command: str) -> Any:
        return _load(command, PANEL_OF[command])


@cache
def _load(command: str, panel: str) -> Any:
    name = MODULES.get(command, command)
    module = import_module(f"cli.{name}")
    if name in GROUPS:
        loaded = typer.main.get_group(getattr(module, f"{name}_group"))
        loaded.rich_help_panel = panel
        return loaded
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(command, rich_help_panel=panel)(getattr(module, name))
    return typer.main.get_command(alone)


class LazyGroup(TyperGroup):
    """Imports a command when it is run. Only the help, which shows all of them, imports all."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast("MutableMapping[str, Any]", LazyCommands())


app = typer.Typer(
    name="enginemesh",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


@app.callback()
def enginemesh() -> None:
    """Serve large language models over gRPC on a fleet of unlike GPUs, with an engine compiled for each."""


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
