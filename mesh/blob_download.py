"""Brings blobs from the store to disk: in parallel ranges, resumed where an earlier try stopped, checked.

Ranges go straight into place, are hashed in order while later ones arrive, and flushed to the disk on the
way. What an unfinished blob has on disk is told in mesh/partial_blob.py. Only a blob whose digest was
checked gets its name `<sha256>`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from mesh.engine_store import blob_key
from mesh.errors import IntegrityError
from mesh.partial_blob import PartialBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future
    from pathlib import Path

    from mesh.manifest import EngineFile
    from mesh.object_store import ObjectStore

PARALLEL_RANGES = 8
"""Ranges under way at once; each holds one connection and its piece of memory."""

PARALLEL_BLOBS = 4
"""Blobs hashed at once, each by one thread: sha256 takes one processor per 1 to 2 GB/s."""

REPORT_INTERVAL_S = 0.25


class BlobDownload:
    """Downloads blobs into one folder. Whoever runs one must be alone with their unfinished files.

    Args:
        objects: Where the blobs are.
        folder: Where they go, each under its sha256.
        on_bytes: Told how many bytes were added since the last call; called in the thread of `run`, every
            REPORT_INTERVAL_S seconds. What it raises ends the download; a later one resumes it.
    """

    def __init__(self, objects: ObjectStore, folder: Path, on_bytes: Callable[[int], None]) -> None:
        self._objects = objects
        self._folder = folder
        self._on_bytes = on_bytes
        self._unreported = 0
        self._counting = threading.Lock()
        self._is_stopped = False

    def run(self, files: Iterable[EngineFile]) -> None:
        """Downloads the blobs of some files; returns when all are whole and in place.

        Raises:
            IntegrityError: the store's blob has another size or digest.
            NotFoundError: the store has no such blob.
            PreconditionError: the disk is too small (DISK_FULL).
            UnavailableError: the store cannot be reached, or somebody wrote to a blob meanwhile.
        """
        blobs = [PartialBlob(self._folder, file) for file in files]
        self._ranges = ThreadPoolExecutor(PARALLEL_RANGES, thread_name_prefix="blob-range")
        self._flushes = ThreadPoolExecutor(1, thread_name_prefix="blob-flush")
        hashes = ThreadPoolExecutor(PARALLEL_BLOBS, thread_name_prefix="blob-hash")
        try:
            pending = {hashes.submit(self._bring, blob) for blob in blobs}
            while pending:
                done, pending = wait(pending, REPORT_INTERVAL_S, FIRST_EXCEPTION)
                for brought in done:
                    brought.result()
                self._report()
        finally:
            self._is_stopped = True
            for pool in (self._ranges, self._flushes, hashes):
                pool.shutdown(cancel_futures=True)

    def _bring(self, blob: PartialBlob) -> None:
        if blob.range_count > 1:
            # Ranges of two versions would make no blob; one that is damaged may be mended at any time.
            info = self._objects.stat(blob_key(blob.file.sha256))
            if info.size != blob.file.size:
                raise IntegrityError(
                    f"blob of {blob.file.path!r} has another size in the store",
                    expected=blob.file.size,
                    actual=info.size,
                )
            blob.expect_version(info.etag)
        if not self._arrives_whole(blob) and not self._second_try(blob):
            raise IntegrityError(
                f"blob of {blob.file.path!r} has another digest in the store", expected=blob.file.sha256
            )
        blob.seal()

    def _second_try(self, blob: PartialBlob) -> bool:
        """What an earlier process left may not have reached the disk before a power cut: fetch it all."""
        if not blob.is_resumed:
            return False
        blob.start_anew(blob.etag)
        self._count(-blob.file.size)
        return self._arrives_whole(blob)

    def _arrives_whole(self, blob: PartialBlob) -> bool:
        """Hashes the blob from the start while later ranges still arrive; whether the digest is right."""
        ranges = [self._ranges.submit(self._fetch_range, blob, index) for index in range(blob.range_count)]
        flush: Future[None] | None = None
        digest = hashlib.sha256()
        with blob.open_for_reading() as content:
            for index, arrival in enumerate(ranges):
                arrival.result()
                if flush is None or flush.done():
                    # The kernel alone would begin to write when memory runs low, or at the end.
                    flush = self._flushes.submit(os.fdatasync, content.fileno())
                for piece in blob.read_range(content, index):
                    self._stop_if_told()
                    digest.update(piece)
            if flush is not None:
                flush.result()
        return digest.hexdigest() == blob.file.sha256

    def _fetch_range(self, blob: PartialBlob, index: int) -> None:
        with blob.open_range(index) as place:
            self._count(place.present)

            def take(piece: memoryview) -> None:
                self._stop_if_told()
                place.append(piece)
                self._count(len(piece))

            self._objects.read_range(blob_key(blob.file.sha256), place.offset, place.missing, take, blob.etag)

    def _stop_if_told(self) -> None:
        if self._is_stopped:
            raise _StoppedError

    def _count(self, size: int) -> None:
        with self._counting:
            self._unreported += size

    def _report(self) -> None:
        with self._counting:
            size, self._unreported = self._unreported, 0
        self._on_bytes(size)


class _StoppedError(Exception):
    """The download has ended."""
