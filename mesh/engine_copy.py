"""Reads every blob of an engine again: to check it in the store, or to write it to a folder.

An exported engine lies in a folder like this, and can be published from it again, under the same name:

    engine/...              its files
    manifest.json           its manifest, byte for byte
    signatures/<key id>.json
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mesh.errors import IntegrityError, NotFoundError
from mesh.manifest import Manifest
from mesh.signing import SIGNATURE_LIMIT_BYTES, Signature
from mesh.store_layout import MANIFEST_LIMIT_BYTES, blob_key, signature_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.engine_store import EngineRecord, EngineStore
    from mesh.manifest import EngineFile

READ_BYTES = 8 << 20
PARALLEL_BLOBS = 4
ENGINE_FOLDER = "engine"
MANIFEST_FILE = "manifest.json"
SIGNATURES_FOLDER = "signatures"


def check_blobs(store: EngineStore, manifest: Manifest) -> Iterator[tuple[EngineFile, str]]:
    """Reads and hashes every file of an engine; gives each with what is wrong with it, empty if nothing."""

    def check(file: EngineFile) -> str:
        try:
            _read(store, file, lambda _data: None)
        except (NotFoundError, IntegrityError) as error:
            return error.message
        return ""

    with ThreadPoolExecutor(PARALLEL_BLOBS) as pool:
        yield from zip(manifest.files, pool.map(check, manifest.files), strict=True)


def export(
    store: EngineStore, record: EngineRecord, folder: Path, on_progress: Callable[[int], None]
) -> None:
    """Writes an engine to an empty folder; `on_progress` is told how many bytes are there.

    Raises:
        NotFoundError: the store has lost a blob.
        IntegrityError: a blob is damaged.
        OSError: as of the disk.
    """
    done = 0
    for file in record.manifest.files:
        path = folder / ENGINE_FOLDER / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as output:

            def write(data: memoryview) -> None:
                nonlocal done
                output.write(data)
                done += len(data)
                on_progress(done)

            _read(store, file, write)
    (folder / SIGNATURES_FOLDER).mkdir()
    for signature in record.signatures:
        (folder / SIGNATURES_FOLDER / f"{signature.key_id}.json").write_bytes(signature.to_bytes())
    (folder / MANIFEST_FILE).write_bytes(record.manifest.to_bytes())  # last: now it is whole


def is_exported(folder: Path) -> bool:
    """Whether a folder is one that `export` wrote to its end."""
    return (folder / MANIFEST_FILE).is_file() and (folder / ENGINE_FOLDER).is_dir()


def read_exported(folder: Path) -> tuple[Manifest, list[Signature]]:
    """Manifest and signatures of an exported engine.

    Raises:
        IntegrityError: one of them is damaged.
    """
    with (folder / MANIFEST_FILE).open("rb") as file:
        data = file.read(MANIFEST_LIMIT_BYTES)
    manifest = Manifest.from_bytes(data, hashlib.sha256(data).hexdigest())
    signatures = []
    for path in sorted((folder / SIGNATURES_FOLDER).glob("*.json")):
        with path.open("rb") as file:
            signatures.append(Signature.from_bytes(file.read(SIGNATURE_LIMIT_BYTES)))
    return manifest, signatures


def add_signatures(store: EngineStore, manifest: Manifest, signatures: list[Signature]) -> None:
    """Puts signatures that others made beside an engine; they are worth what the readers' trust says."""
    for signature in signatures:
        store.objects.put_if_absent(signature_key(manifest.digest, signature.key_id), signature.to_bytes())


def _read(store: EngineStore, file: EngineFile, take: Callable[[memoryview], None]) -> None:
    """Reads a blob in pieces, and checks it with its last byte."""
    key = blob_key(file.sha256)
    size = store.objects.stat(key).size
    if size != file.size:
        raise IntegrityError(
            f"blob of {file.path!r} has {size} bytes, not {file.size}", expected=file.size, actual=size
        )
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(size, READ_BYTES)))
    for offset in range(0, size, READ_BYTES):
        piece = buffer[: size - offset]
        store.objects.read_into(key, offset, piece)
        digest.update(piece)
        take(piece)
    if digest.hexdigest() != file.sha256:
        raise IntegrityError(f"blob of {file.path!r} has another digest", expected=file.sha256)
