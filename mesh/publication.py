"""Publishes one engine: its blobs, its signature, then its manifest."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from mesh import sweeps
from mesh.errors import IntegrityError, MeshError, NotFoundError, PreconditionError, UnavailableError
from mesh.store_layout import blob_key, manifest_key, signature_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

    from mesh.manifest import EngineFile, Manifest
    from mesh.object_store import ObjectStore
    from mesh.signing import SigningKey


class Publication:
    """One attempt to publish an engine.

    Args:
        objects: Where to.
        manifest: The engine.
        folder: Where its files are.
        on_progress: Told (bytes done, bytes in all) now and then, from the calling thread. What it raises
            ends the attempt.
    """

    def __init__(
        self,
        objects: ObjectStore,
        manifest: Manifest,
        folder: Path,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._objects = objects
        self._manifest = manifest
        self._folder = folder
        self._on_progress = on_progress
        self._done = 0
        self._sent: set[str] = set()

    def run(self, signing_key: SigningKey | None) -> None:
        """Returns when the manifest is in the store; raises as EngineStore.publish does."""
        try:
            while not self._try(signing_key):
                self._done = 0
        except UnavailableError:
            raise  # there is no store to clean up; the next garbage collection does it
        except BaseException:
            with suppress(MeshError):
                sweeps.sweep(self._objects, sweeps.References(self._objects), self._sent)
            raise

    def _try(self, signing_key: SigningKey | None) -> bool:
        """Publishes; False if blobs might have been removed meanwhile."""
        manifest = self._manifest
        blobs = {file.sha256 for file in manifest.files}
        with sweeps.announced(
            self._objects, manifest.digest, blobs, lambda: self._advance(0)
        ) as is_announced:
            for file in manifest.files:
                self._publish_blob(file)
            # Before the manifest, so that nobody sees it unsigned.
            if signing_key is not None:
                signature = signing_key.sign(manifest.to_bytes())
                self._objects.put_bytes(
                    signature_key(manifest.digest, signature.key_id), signature.to_bytes()
                )
            self._publish_manifest()
            return is_announced()

    def _publish_manifest(self) -> None:
        key, data = manifest_key(self._manifest.digest), self._manifest.to_bytes()
        if self._objects.put_if_absent(key, data):
            return
        with suppress(NotFoundError, PreconditionError):  # the latter: it has more bytes
            if self._objects.get_bytes(key, limit=len(data)) == data:
                return
        self._objects.put_bytes(key, data)  # its name allows one content only: that was damaged

    def _publish_blob(self, file: EngineFile) -> None:
        key = blob_key(file.sha256)
        if self._has(key, file.size):
            self._advance(file.size)
            return
        with (self._folder / file.path).open("rb") as stream:
            actual = os.fstat(stream.fileno()).st_size
            if actual != file.size:
                raise IntegrityError(
                    f"file {file.path!r} has {actual} bytes, its manifest says {file.size}",
                    expected=file.size,
                    actual=actual,
                )
            reader = _CheckedReader(stream, file, self._advance)
            if file.size == 0:
                reader.check()  # of an empty stream nothing is read
            self._sent.add(file.sha256)
            self._objects.put_stream(key, reader, file.size)

    def _has(self, key: str, size: int) -> bool:
        try:
            return self._objects.stat(key).size == size
        except NotFoundError:
            return False

    def _advance(self, count: int) -> None:
        self._done += count
        if self._on_progress:
            self._on_progress(self._done, self._manifest.size)


class _CheckedReader:
    """Reads a file and raises IntegrityError with its last byte unless the digest is the expected one.

    The store makes an object only after its last byte was read, so nothing wrong gets in.
    """

    def __init__(self, stream: BinaryIO, file: EngineFile, advance: Callable[[int], None]) -> None:
        self._stream = stream
        self._file = file
        self._advance = advance
        self._digest = hashlib.sha256()
        self._count = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        self._count += len(data)
        if self._count >= self._file.size:
            self.check()
        self._advance(len(data))
        return data

    def check(self) -> None:
        if self._digest.hexdigest() != self._file.sha256:
            raise IntegrityError(
                f"file {self._file.path!r} has another digest than its manifest says",
                expected=self._file.sha256,
                actual=self._digest.hexdigest(),
            )
