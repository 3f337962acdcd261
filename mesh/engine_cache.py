"""Engines on this host's disk, shared by all its workers and kept within a size.

    <folder>/lock                    locked while somebody fetches or evicts
    <folder>/waiting                 holds a shared lock of each who waits for that and has nothing to serve
    <folder>/blobs/<sha256>          a whole, checked blob (beside it: what BlobDownload leaves)
    <folder>/engines/<digest>/       a whole engine of hard links to blobs; its users hold a shared lock on it
    <folder>/engines/<digest>.partial/   being put together, or left by a process that died

All locks are flocks: they end with the process that holds them. The folder must be on a local disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace

from mesh import semconv
from mesh.blob_download import BlobDownload
from mesh.errors import ExhaustedError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from mesh.engine_store import EngineStore
    from mesh.manifest import EngineFile, Manifest

HASH_BYTES = 1 << 20
HASH_THREADS = 4
LOCK_POLL_S = 0.05
RETRY_AFTER_S = 30.0
GIVE_WAY_S = 1.0

_tracer = trace.get_tracer("enginemesh.engine_cache")


class EngineCache:
    """Fetches engines and keeps those used last.

    Args:
        folder: Where; made if absent. Workers of one host share it.
        limit_bytes: Size of all blobs together that it keeps to.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = folder / "lock"
        self._waiting = folder / "waiting"
        self._blobs = folder / "blobs"
        self._engines = folder / "engines"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._engines.mkdir(exist_ok=True)
        self._held: dict[str, int] = {}

    def fetch(
        self,
        store: EngineStore,
        manifest: Manifest,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        gives_way: bool = False,
    ) -> Path:
        """The folder of an engine, fetched if it is not here, with every digest checked.

        The engine is safe from eviction until `release` or the end of this process. Its files are
        read-only, and shared with other engines and workers. If another worker of the host fetches
        something, this waits for its turn.

        Args:
            store: Where to fetch from.
            manifest: The engine.
            on_progress: Told (bytes here, bytes in all), in the calling thread, several times a second.
                What it raises ends the fetch; the next one goes on from there.
            gives_way: Whether the engine is not needed yet: then others of the host that wait go first.

        Raises:
            IntegrityError: the store's copy is damaged.
            NotFoundError: the store has lost a blob.
            PreconditionError: the engine is larger than the cache (CACHE_TOO_SMALL), or the disk is full.
            ExhaustedError: engines in use by other workers leave no room, or others go first.
            UnavailableError: the store cannot be reached.
        """
        report = _Progress(
            _size_on_disk(manifest), self._giving_way(on_progress) if gives_way else on_progress
        )
        folder = self._engines / manifest.digest
        is_damaged = False
        while True:
            if self._hold(manifest.digest):
                if _is_whole(folder, manifest):
                    os.utime(folder)  # used last: now
                    return folder
                is_damaged = True
                self.release(manifest.digest)
            with self._alone(report, is_urgent=not gives_way):
                if folder.is_dir() and not is_damaged:
                    continue  # another worker of this host brought it meanwhile
                self._bring(store, manifest, report)
                self._hold(manifest.digest)
                return folder

    def release(self, digest: str) -> None:
        """Says that this process no longer uses an engine; harmless if it did not."""
        descriptor = self._held.pop(digest, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Releases every engine."""
        for digest in list(self._held):
            self.release(digest)

    def _bring(self, store: EngineStore, manifest: Manifest, report: _Progress) -> None:
        """Fetches what is missing of an engine and puts its folder together; needs the lock."""
        with _tracer.start_as_current_span("engine.fetch") as span:
            blobs = {file.sha256: file for file in manifest.files}
            whole = _verify({self._blobs / sha256: file for sha256, file in blobs.items()})
            missing = [file for sha256, file in blobs.items() if self._blobs / sha256 not in whole]
            for file in missing:
                (self._blobs / file.sha256).unlink(missing_ok=True)  # it was damaged
            size = sum(file.size for file in missing)
            span.set_attributes({semconv.ENGINE: manifest.digest, semconv.BYTES: size})
            self._make_room(report.total, wanted=blobs.keys())
            report.add(report.total - size)
            BlobDownload(store.objects, self._blobs, report.add).run(missing)
            self._assemble(manifest)

    def _assemble(self, manifest: Manifest) -> None:
        folder = self._engines / manifest.digest
        partial = self._engines / f"{manifest.digest}.partial"
        partial.mkdir()
        for file in manifest.files:
            path = partial / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(self._blobs / file.sha256)
        if folder.exists():  # damaged
            shutil.rmtree(self._set_aside(folder))
        partial.rename(folder)

    def _hold(self, digest: str) -> bool:
        """Takes the shared lock that says this process uses an engine; False if it is not here."""
        if digest in self._held:
            return True
        folder = self._engines / digest
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        # Somebody may be evicting it, or may have done so since it was opened.
        if not (_try_lock(descriptor, fcntl.LOCK_SH) and _is_at(folder, descriptor)):
            os.close(descriptor)
            return False
        self._held[digest] = descriptor
        return True

    @contextmanager
    def _alone(self, report: _Progress, *, is_urgent: bool) -> Iterator[None]:
        """Holds the cache's lock."""
        with self._lock.open("ab") as file:
            with self._waiting.open("ab") as waiting:
                if is_urgent:
                    fcntl.flock(waiting, fcntl.LOCK_SH)
                while not _try_lock(file.fileno(), fcntl.LOCK_EX):
                    report.add(0)
                    time.sleep(LOCK_POLL_S)
            yield

    def _giving_way(self, on_progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """A callback that ends a fetch when somebody waits who needs the cache more."""

        def report(done: int, total: int) -> None:
            with self._waiting.open("ab") as waiting:
                if not _try_lock(waiting.fileno(), fcntl.LOCK_EX):
                    raise ExhaustedError("another worker of this host needs an engine first", GIVE_WAY_S)
            if on_progress:
                on_progress(done, total)

        return report

    def _make_room(self, size: int, wanted: Collection[str]) -> None:
        """Evicts until blobs of `size` bytes fit within the limit beside what is kept; needs the lock.

        Leftovers go first, then engines, the one used longest ago before the others.
        """
        if size > self._limit:
            raise PreconditionError(
                "CACHE_TOO_SMALL",
                str(self._engines),
                f"the engine has {size} bytes; ENGINEMESH_CACHE_LIMIT_BYTES is {self._limit}",
                size=size,
                limit=self._limit,
            )
        for leftover in self._engines.glob("*.partial"):
            shutil.rmtree(leftover)
        if not self._fits(size, wanted):
            self._drop_loose_blobs(wanted)
        for folder in sorted(self._engines.iterdir(), key=lambda folder: folder.stat().st_mtime):
            if self._fits(size, wanted):
                return
            if self._evict(folder):
                self._drop_loose_blobs(wanted)
        if not self._fits(size, wanted):
            raise ExhaustedError(
                f"no room for {size} bytes within ENGINEMESH_CACHE_LIMIT_BYTES ({self._limit}): the other "
                "engines are in use by workers of this host",
                RETRY_AFTER_S,
                size=size,
                limit=self._limit,
            )

    def _fits(self, size: int, wanted: Collection[str]) -> bool:
        others = (path for path in self._blobs.iterdir() if path.stem not in wanted)
        return sum(path.stat().st_size for path in others) + size <= self._limit

    def _evict(self, folder: Path) -> bool:
        """Removes an engine unless a process uses it."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                return False
            shutil.rmtree(self._set_aside(folder))
            return True
        finally:
            os.close(descriptor)

    def _set_aside(self, folder: Path) -> Path:
        """Takes an engine's name away first, so that a half removed one never bears it."""
        return folder.rename(folder.with_name(f"{folder.name}.old.partial"))

    def _drop_loose_blobs(self, wanted: Collection[str]) -> None:
        """Removes blobs that no engine has, whole or not."""
        for path in self._blobs.iterdir():
            if path.stem not in wanted and path.stat().st_nlink == 1:
                path.unlink()


class _Progress:
    """Counts bytes for a callback of (done, total)."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self.total = total
        self._done = 0
        self._on_progress = on_progress

    def add(self, size: int) -> None:
        self._done += size
        if self._on_progress:
            self._on_progress(self._done, self.total)


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _size_on_disk(manifest: Manifest) -> int:
    return sum({file.sha256: file.size for file in manifest.files}.values())


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder holds exactly the engine's files: an engine may load more than the manifest names."""
    files = {folder / file.path: file for file in manifest.files}
    found = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    return found == files.keys() and _verify(files) == found


def _verify(files: Mapping[Path, EngineFile]) -> set[Path]:
    """Which of the files are there and have the right digest."""
    size = sum(file.size for file in files.values())
    with (
        _tracer.start_as_current_span("engine.verify", attributes={semconv.BYTES: size}),
        ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="blob-hash") as pool,
    ):
        are_whole = pool.map(_has_digest, files.keys(), files.values())
        return {path for path, is_whole in zip(files, are_whole, strict=True) if is_whole}


def _has_digest(path: Path, file: EngineFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == file.sha256
