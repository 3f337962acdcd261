"""`enginemesh diff`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import JsonOption  # noqa: TC001 -- typer reads annotations when it runs
from cli.store_access import open_store
from cli.tables import print_table, size

if TYPE_CHECKING:
    from mesh.manifest_diff import Difference, ManifestDiff

VALUE_WIDTH = 48
_ENGINE = "Engine, by its digest or the first digits of it."


def diff(
    first: Annotated[str, typer.Argument(help=_ENGINE)],
    second: Annotated[str, typer.Argument(help=_ENGINE)],
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two engines, and which part of the build key made it differ."""
    from mesh.manifest_diff import diff_manifests  # noqa: PLC0415 - see cli/store_access.py

    store = open_store()
    found = diff_manifests(*(store.manifest(store.resolve(engine)) for engine in (first, second)))
    if as_json:
        print(json.dumps(asdict(found), indent=2, ensure_ascii=False))
        return
    print(_key_line(found))
    rows = [("build key", *_shown(difference)) for difference in found.key]
    rows += [("manifest", *_shown(difference)) for difference in found.fields]
    rows += [("file", each.path, _size(each.first), _size(each.second)) for each in found.files]
    print_table(("part", "what", "first", "second"), rows, "Nothing differs.")
    print(f"{found.shared_files} files with {size(found.shared_bytes)} are in both, and stored once")


def _key_line(found: ManifestDiff) -> str:
    if found.is_same_key:
        return "The same build key: both were made of the same."
    if not found.has_key_parts:
        return "Different build keys; one of them does not say what it was made of."
    return "Different build keys, by " + ", ".join(difference.name for difference in found.key)


def _shown(difference: Difference) -> tuple[str, str, str]:
    return difference.name, _short(difference.first), _short(difference.second)


def _short(text: str) -> str:
    if not text:
        return "-"
    return text if len(text) <= VALUE_WIDTH else f"{text[: VALUE_WIDTH - 1]}\N{HORIZONTAL ELLIPSIS}"


def _size(count: int | None) -> str:
    return "-" if count is None else size(count)
