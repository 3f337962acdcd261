"""Engines in the store: content-addressed blobs, then the manifest, then the markers that make it found.

mesh/store_layout.py says what lies where.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mesh.errors import IntegrityError, InvalidFieldError, NotFoundError, PreconditionError
from mesh.manifest import Manifest
from mesh.object_store import ObjectStore
from mesh.publication import Publication
from mesh.signing import SIGNATURE_LIMIT_BYTES, Signature, SigningKey, Trust
from mesh.store_layout import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_SUFFIX,
    MANIFESTS,
    MODELS,
    blob_key,
    build_marker,
    engine_log_key,
    manifest_key,
    model_marker,
    signatures_prefix,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path

    from mesh.settings import BuildWorkerSettings, ClientSettings
    from mesh.signing import Verdict

__all__ = ["EngineRecord", "EngineStore", "blob_key"]

PARALLEL_READS = 8
SIGNATURES_LIMIT = 16
"""Signatures of one engine that are read; more than these nobody looks at."""

PREFIX_MIN = 4
"""Digits of a digest that may name an engine, if no other begins alike."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(rf"[0-9a-f]{{{PREFIX_MIN},64}}")
_log = structlog.get_logger()


@dataclass(frozen=True)
class EngineRecord:
    """An engine, when its manifest was published (UTC), and who signed it."""

    manifest: Manifest
    create_time: datetime
    signatures: tuple[Signature, ...] = ()

    @property
    def digest(self) -> str:
        """The engine's name."""
        return self.manifest.digest

    def verdict(self, trust: Trust) -> Verdict:
        """What this engine's signatures are worth where this trust holds."""
        return trust.examine(self.manifest.to_bytes(), self.signatures)

    def refusal(self, trust: Trust) -> str:
        """Why this engine may not be used where this trust holds; empty if it may."""
        return trust.refusal(self.manifest.to_bytes(), self.signatures)


class EngineStore:
    """Engines in an object store. Synchronous and thread-safe, with the errors of ObjectStore.

    Args:
        objects: Where.
        signing_key: Signs what is published.
        trust: Engines that it refuses are not found as what a build made.
    """

    def __init__(
        self, objects: ObjectStore, signing_key: SigningKey | None = None, trust: Trust | None = None
    ) -> None:
        self.objects = objects
        self._signing_key = signing_key
        self._trust = trust

    @classmethod
    def of_publisher(cls, settings: BuildWorkerSettings | ClientSettings) -> EngineStore:
        """The store for a process that publishes: it signs, and trusts its own key too.

        Raises:
            PreconditionError: no key is set although signatures are required (NO_SIGNING_KEY), or a key file
                is wrong (BAD_KEY).
        """
        if settings.signing_key is None and settings.signature_policy == "require":
            raise PreconditionError(
                "NO_SIGNING_KEY",
                "ENGINEMESH_SIGNING_KEY",
                "engines must be signed here (ENGINEMESH_SIGNATURE_POLICY is require), and "
                "ENGINEMESH_SIGNING_KEY names no key; `enginemesh keys new FILE` makes one",
            )
        key = SigningKey.load(settings.signing_key) if settings.signing_key is not None else None
        trust = Trust.from_settings(settings)
        return cls(ObjectStore.from_settings(settings), key, trust.including(key) if key else trust)

    def publish(
        self, manifest: Manifest, folder: Path, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Stores an engine whose files lie in `folder`; nobody sees it before it is whole.

        Blobs that the store has already are not sent again. Publishing the same engine twice, also at the
        same time, is harmless; of two engines of one build the first is the one that find_build gives. If
        this fails, what it sent and nobody else needs is removed.

        Args:
            manifest: The engine.
            folder: Where its files are.
            on_progress: Told (bytes done, bytes in all) now and then, from the calling thread.

        Raises:
            IntegrityError: a file differs from what the manifest says of it.
            FileNotFoundError: a file is missing.
        """
        Publication(self.objects, manifest, folder, on_progress).run(self._signing_key)
        self._mark_build(manifest)
        self.objects.put_if_absent(model_marker(manifest.model, manifest.digest), b"")

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
            info, data = self.objects.get(manifest_key(digest), MANIFEST_LIMIT_BYTES)
        except NotFoundError:
            raise NotFoundError("engine", digest) from None
        manifest = Manifest.from_bytes(data, digest)
        return EngineRecord(manifest, info.last_modified, self._signatures(digest))

    def resolve(self, name: str) -> str:
        """The digest that begins with `name`, the way in which people write one; "engines/" may go before.

        Raises:
            NotFoundError: the store has none.
            InvalidFieldError: several begin alike.
        """
        start = name.removeprefix("engines/")
        if not _PREFIX.fullmatch(start):
            raise InvalidFieldError(
                "engine", f"must be a digest or at least its first {PREFIX_MIN} digits, not {name!r}"
            )
        found = [_digest_in(entry.key) for entry in self.objects.list(f"{MANIFESTS}{start}")]
        if not found:
            raise NotFoundError("engine", name)
        if len(found) > 1:
            raise InvalidFieldError("engine", f"{len(found)} engines begin with {start}: give more digits")
        return found[0]

    def find_build(self, build_key: str) -> str | None:
        """The digest of the engine that a build made; None if the store has none, or none that is trusted."""
        try:
            digest = self.objects.get_bytes(build_marker(build_key), limit=64).decode("ascii", "replace")
        except NotFoundError:
            return None
        if self._trust is None:
            is_there = _DIGEST.fullmatch(digest) and self.objects.exists(manifest_key(digest))
            return digest if is_there else None
        try:
            refusal = self.record(digest).refusal(self._trust)
        except (NotFoundError, IntegrityError) as error:
            refusal = error.message
        if refusal:
            _log.warning("engine of the same build not used", engine=digest, reason=refusal)
        return None if refusal else digest

    def engines(self, model: str | None = None) -> list[EngineRecord]:
        """All engines, or those of one model, newest first. Manifests that cannot be read are left out."""
        prefix = MANIFESTS if model is None else f"{MODELS}{model}/"
        names = [_digest_in(entry.key) for entry in self.objects.list(prefix)]
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            records = [record for record in pool.map(self._readable_record, names) if record]
        return sorted(records, key=lambda record: (record.create_time, record.digest), reverse=True)

    def hide(self, manifest: Manifest) -> None:
        """Makes sure that no build finds this engine any more; `show` is the inverse."""
        key = build_marker(manifest.build_key)
        try:
            is_its = self.objects.get_bytes(key, limit=64) == manifest.digest.encode()
        except NotFoundError:
            return
        if is_its:
            self.objects.delete(key)

    def show(self, manifest: Manifest) -> None:
        """Has the engine found as what its build made, unless another took its place."""
        self._mark_build(manifest)

    def remove(self, digest: str) -> None:
        """Removes an engine and its log, but not its blobs, which others may share; harmless if it is gone.

        Nobody may use it; mesh/engine_removal.py makes sure of that.
        """
        self.objects.delete(manifest_key(digest))
        markers = [entry.key for entry in self.objects.list(MODELS) if _digest_in(entry.key) == digest]
        signatures = [entry.key for entry in self.objects.list(signatures_prefix(digest))]
        for key in (*markers, *signatures, engine_log_key(digest)):
            self.objects.delete(key)

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

    def _signatures(self, digest: str) -> tuple[Signature, ...]:
        signatures = []
        for entry in list(self.objects.list(signatures_prefix(digest)))[:SIGNATURES_LIMIT]:
            try:
                signatures.append(
                    Signature.from_bytes(self.objects.get_bytes(entry.key, SIGNATURE_LIMIT_BYTES))
                )
            except (NotFoundError, PreconditionError, IntegrityError) as error:  # it is worth nothing
                _log.warning("signature left out", key=entry.key, reason=error.message)
        return tuple(signatures)

    def _mark_build(self, manifest: Manifest) -> None:
        key = build_marker(manifest.build_key)
        digest = manifest.digest.encode()
        if not self.objects.put_if_absent(key, digest) and self.find_build(manifest.build_key) is None:
            self.objects.put_bytes(key, digest)  # the marker named an engine that was removed since

    def _readable_record(self, digest: str) -> EngineRecord | None:
        try:
            return self.record(digest)
        except (NotFoundError, IntegrityError, PreconditionError) as error:
            _log.warning("engine left out", engine=digest, reason=error.message)
            return None


def _digest_in(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(MANIFEST_SUFFIX)
