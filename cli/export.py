"""`enginemesh export`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import Annotated

import typer

from cli.failures import EXIT_REFUSED, CommandError
from cli.store_access import open_store
from cli.tables import DIGEST_LENGTH
from cli.transfer_bar import transfer_bar


def export(
    engine: Annotated[str, typer.Argument(help="Engine, by its digest or the first digits of it.")],
    folder: Annotated[Path, typer.Argument(help="Where it goes: an empty folder, made if absent.")],
) -> None:
    """Write an engine to a folder, checked, with its manifest and signatures; `import` takes it back."""
    from mesh.engine_copy import export as write  # noqa: PLC0415 - see cli/store_access.py

    store = open_store()
    record = store.record(store.resolve(engine))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CommandError(f"{folder} is not empty", EXIT_REFUSED)
        with transfer_bar(record.manifest.size) as show:
            write(store, record, folder, show)
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}") from error
    print(f"engine {record.digest[:DIGEST_LENGTH]} is in {folder}")
