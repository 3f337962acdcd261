"""The files of an engine in a folder."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mesh.manifest import EngineFile

if TYPE_CHECKING:
    from pathlib import Path

HASH_BYTES = 1 << 20


def list_files(folder: Path) -> tuple[EngineFile, ...]:
    """Every file below `folder` with its size and sha256, by path."""
    return tuple(
        EngineFile(path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )


def sha256_of(path: Path) -> str:
    """The digest of a file, in hex."""
    sha256 = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(HASH_BYTES):
            sha256.update(data)
    return sha256.hexdigest()
