"""`enginemesh delete`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.failures import EXIT_REFUSED, CommandError
from cli.options import GatewayOption, connect
from cli.tables import bare

if TYPE_CHECKING:
    from cli.client import Client


DIGEST_DIGITS = 64


def delete(
    engine: Annotated[str, typer.Argument(help="Engine, by its digest or the first digits of it.")],
    gateway: GatewayOption,
) -> None:
    """Remove an engine that nobody uses. What only it needed goes with the next `enginemesh gc`."""
    with connect(gateway) as client:
        name = _name(client, engine)
        client.delete_engine(name)
    print(f"engine {bare(name, digest=True)} is removed")


def _name(client: Client, engine: str) -> str:
    start = bare(engine)
    if len(start) == DIGEST_DIGITS:  # also one that is not listed, as its manifest is damaged
        return f"engines/{start}"
    names = [listed.name for listed in client.engines() if bare(listed.name).startswith(start)]
    if len(names) != 1 or not start:
        found = f"{len(names)} engines begin" if names else "no engine begins"
        raise CommandError(f"{found} with {start!r}; `enginemesh engines` lists them", EXIT_REFUSED)
    return names[0]
