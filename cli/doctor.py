"""`enginemesh doctor`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cli.checks import Check, State, run_all
from cli.drift import check_drift, kinds
from cli.failures import EXIT_FAILED, EXIT_REFUSED, CommandError
from cli.options import DataOption, JsonOption, local_settings
from cli.tables import stdout_console

_STYLES = {State.ok: "green", State.missing: "yellow", State.failed: "red"}


def doctor(
    data: DataOption,
    *,
    kind: Annotated[
        str, typer.Option(help="Only compare this kind's library with what the mesh holds it for.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the mesh that it can reach; say what is wrong and what helps.

    Ends with status 1 if something failed. What is only missing, such as an engine kind for other
    hardware, is no failure.
    """
    if kind and kind not in kinds():
        raise CommandError(
            f"there is no contract for kind {kind!r}, only for {', '.join(kinds())}", EXIT_REFUSED
        )
    checks = check_drift(kind) if kind else run_all(local_settings(data))
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        _print(checks)
    if any(check.state is State.failed for check in checks):
        raise typer.Exit(EXIT_FAILED)


def _print(checks: list[Check]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        detail = Text(check.detail)
        if check.hint:
            detail.append(f"\n{check.hint}", style="bright_black")
        table.add_row(Text(check.state.value, style=_STYLES[check.state]), check.name, detail)
    stdout_console().print(table)
