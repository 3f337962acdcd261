"""Engines in the store: content-addressed blobs, then the manifest, then the markers that make it found.

Layout of the bucket:

    blobs/sha256/<first two digits>/<sha256>   a file of one or more engines
    manifests/<engine>.json                    canonical JSON; its sha256 is the engine's digest
    builds/<build key>                         text: the digest of the engine that the build made
    models/<model>/<engine>                    empty: this model has this engine
"""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mesh.errors import IntegrityError, NotFoundError, PreconditionError
from mesh.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path
    from typing import BinaryIO

    from mesh.manifest import EngineFile
    from mesh.object_store import ObjectStore

MANIFEST_LIMIT_BYTES = 8 << 20
PARALLEL_READS = 8

_DIGEST = re.compile(r"[0-9a-f]{64}")
_log = structlog.get_logger()


@dataclass(frozen=True)
class EngineRecord:
    """An engine and when its manifest was published (UTC)."""

    manifest: Manifest
    create_time: datetime

    @property
    def digest(self) -> str:
        """The engine's name."""
        return self.manifest.digest


class EngineStore:
    """Engines in an object store. Synchronous and thread-safe, with the errors of ObjectStore."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects

    def publish(
        self, manifest: Manifest, folder: Path, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Stores an engine whose files lie in `folder`; nobody sees it before it is whole.

        Blobs that the store has already are not sent again. Publishing the same engine twice, also at the
        same time, is harmless; of two engines of one build the first is the one that find_build gives.

        Args:
            manifest: The engine.
            folder: Where its files are.
            on_progress: Told (bytes done, bytes in all) now and then, from the calling thread.

        Raises:
            IntegrityError: a file differs from what the manifest says of it.
            FileNotFoundError: a file is missing.
        """
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if on_progress:
                on_progress(done, manifest.size)

        for file in manifest.files:
            self._publish_blob(file, folder / file.path, advance)
        self.objects.put_if_absent(_manifest_key(manifest.digest), manifest.to_bytes())
        self._mark_build(manifest)
        self.objects.put_if_absent(f"models/{manifest.model}/{manifest.digest}", b"")

    def manifest(self, digest: str) -> Manifest:
        """The manifest of one engine.

        Raises:
            NotFoundError: there is none, or `digest` is no digest.
            IntegrityError: the object's content is not what its name says.
        """
        return self.record(digest).manifest

    def record(self, digest: str) -> EngineRecord:
        """One engine with its time of publication; raises as `manifest` does."""
        if not _DIGEST.fullmatch(digest):
            raise NotFoundError("engine", digest)
        try:
            info, data = self.objects.get(_manifest_key(digest), MANIFEST_LIMIT_BYTES)
        except NotFoundError:
            raise NotFoundError("engine", digest) from None
        return EngineRecord(Manifest.from_bytes(data, digest), info.last_modified)

    def find_build(self, build_key: str) -> str | None:
        """The digest of the engine that a build made; None if the store has none."""
        try:
            digest = self.objects.get_bytes(f"builds/{build_key}", limit=64).decode("ascii", "replace")
        except NotFoundError:
            return None
        is_there = _DIGEST.fullmatch(digest) and self.objects.exists(_manifest_key(digest))
        return digest if is_there else None

    def engines(self, model: str | None = None) -> list[EngineRecord]:
        """All engines, or those of one model, newest first. Manifests that cannot be read are left out."""
        prefix = "manifests/" if model is None else f"models/{model}/"
        names = [entry.key.removeprefix(prefix).removesuffix(".json") for entry in self.objects.list(prefix)]
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            records = [record for record in pool.map(self._readable_record, names) if record]
        return sorted(records, key=lambda record: (record.create_time, record.digest), reverse=True)

    def read_file(self, manifest: Manifest, path: str, limit: int) -> bytes:
        """One file of an engine, checked against its digest.

        Raises:
            NotFoundError: the engine has no such file, or the store lost it.
            PreconditionError: it has more than `limit` bytes.
            IntegrityError: its content is not what the manifest says.
        """
        try:
            file = manifest.file(path)
        except KeyError:
            raise NotFoundError("file", path, f"engine {manifest.digest} has no file {path!r}") from None
        if file.size > limit:
            raise PreconditionError(
                "FILE_TOO_LARGE",
                f"engines/{manifest.digest}",
                f"file {path!r} of the engine has {file.size} bytes; the limit is {limit}",
                size=file.size,
                limit=limit,
            )
        data = self.objects.get_bytes(blob_key(file.sha256), limit=file.size)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise IntegrityError(f"blob of {path!r} has another digest", expected=file.sha256)
        return data

    def _publish_blob(self, file: EngineFile, path: Path, advance: Callable[[int], None]) -> None:
        key = blob_key(file.sha256)
        if self._has(key, file.size):
            advance(file.size)
            return
        with path.open("rb") as stream:
            actual = os.fstat(stream.fileno()).st_size
            if actual != file.size:
                raise IntegrityError(
                    f"file {file.path!r} has {actual} bytes, its manifest says {file.size}",
                    expected=file.size,
                    actual=actual,
                )
            reader = _CheckedReader(stream, file, advance)
            if file.size == 0:
                reader.check()  # of an empty stream nothing is read
            self.objects.put_stream(key, reader, file.size)

    def _has(self, key: str, size: int) -> bool:
        try:
            return self.objects.stat(key).size == size
        except NotFoundError:
            return False

    def _mark_build(self, manifest: Manifest) -> None:
        key = f"builds/{manifest.build_key}"
        digest = manifest.digest.encode()
        if not self.objects.put_if_absent(key, digest) and self.find_build(manifest.build_key) is None:
            self.objects.put_bytes(key, digest)  # the marker named an engine that was removed since

    def _readable_record(self, digest: str) -> EngineRecord | None:
        try:
            return self.record(digest)
        except (NotFoundError, IntegrityError, PreconditionError) as error:
            _log.warning("engine left out", engine=digest, reason=error.message)
            return None


def blob_key(sha256: str) -> str:
    """Where the blob of this digest lies in the bucket."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def _manifest_key(digest: str) -> str:
    return f"manifests/{digest}.json"


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
