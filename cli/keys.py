"""`enginemesh keys`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import Annotated

import typer

from cli.failures import CommandError
from cli.options import JsonOption, local_settings
from cli.tables import print_table

keys_group = typer.Typer(name="keys", no_args_is_help=True, help="Make and show the keys that sign engines.")


@keys_group.command()
def new(
    file: Annotated[Path, typer.Argument(help="Where the private key goes; the public one: FILE.pub.")],
) -> None:
    """Make a key that signs engines."""
    from mesh.signing import SigningKey  # noqa: PLC0415 - see cli/store_access.py

    key = SigningKey.generate()
    try:
        public = key.save(file)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from error
    print(f"key {key.key_id}")
    print(f"  {file}: for build workers (ENGINEMESH_SIGNING_KEY); keep it secret")
    print(f"  {public}: for gateways and inference workers (ENGINEMESH_TRUSTED_KEYS)")


@keys_group.command("list")
def list_keys(as_json: JsonOption = False) -> None:
    """List the keys that are trusted here, and the one that signs."""
    from mesh.signing import SigningKey, Trust  # noqa: PLC0415 - see cli/store_access.py

    settings = local_settings()
    own = SigningKey.load(settings.signing_key).key_id if settings.signing_key else ""
    trust = Trust.from_settings(settings)
    rows = [(key, key in trust.key_ids, key == own) for key in sorted({*trust.key_ids, own} - {""})]
    if as_json:
        names = ("key", "is_trusted", "signs")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    words = [(key, "yes" if trusted else "no", "yes" if signs else "") for key, trusted, signs in rows]
    empty = "No key is trusted, and none signs: `enginemesh keys new FILE` makes one."
    print_table(("key", "trusted", "signs"), words, empty)
