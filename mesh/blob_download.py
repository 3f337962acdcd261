"""Brings blobs from the store to disk: in parallel ranges, resumed where an earlier try stopped, checked.

While a blob is on its way, its content lies in `<sha256>.partial`, and `<sha256>.ranges` holds one byte per
range: 1 once that range is in its place. Only a blob whose digest was checked gets its name `<sha256>`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from mesh.engine_store import blob_key
from mesh.errors import IntegrityError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from mesh.manifest import EngineFile
    from mesh.object_store import ObjectStore

MIB = 1 << 20
RANGE_BYTES = 8 * MIB
PARALLEL_RANGES = 8
"""Ranges under way at once; each holds RANGE_BYTES of memory.

On 2 cores that also ran the store, 1 range of 4 to 16 MiB brought 270 to 380 MB/s, 2 to 16 at once 290 to
580 in no clear order: there the processor is the limit. Stores further away need several.
"""

HASH_BYTES = MIB
REPORT_INTERVAL_S = 0.25


class BlobDownload:
    """Downloads blobs into one folder. Whoever runs one must be alone with the folder.

    Args:
        objects: Where the blobs are.
        folder: Where they go, each under its sha256.
        on_bytes: Told how many bytes were added since the last call; called in the thread of `run`, at
            least every REPORT_INTERVAL_S seconds. What it raises ends the download; a later one resumes it.
    """

    def __init__(self, objects: ObjectStore, folder: Path, on_bytes: Callable[[int], None]) -> None:
        self._objects = objects
        self._folder = folder
        self._on_bytes = on_bytes
        self._unreported = 0
        self._counting = threading.Lock()

    def run(self, files: Iterable[EngineFile]) -> None:
        """Downloads the blobs of some files; returns when all are whole and in place.

        Raises:
            IntegrityError: the store's blob has another size or digest.
            NotFoundError: the store has no such blob.
            PreconditionError: the disk is too small (DISK_FULL).
            UnavailableError: the store cannot be reached.
        """
        pool = ThreadPoolExecutor(PARALLEL_RANGES, thread_name_prefix="blob-range")
        try:
            blobs = [PartialBlob(self._folder, file) for file in files]
            started = [self._start(pool, blob) for blob in blobs]
            for blob, ranges in zip(blobs, started, strict=True):
                if not self._arrives_whole(blob, ranges) and not self._second_try(pool, blob):
                    raise IntegrityError(
                        f"blob of {blob.file.path!r} has another digest in the store",
                        expected=blob.file.sha256,
                    )
                blob.seal()
        finally:
            pool.shutdown(cancel_futures=True)

    def _start(self, pool: ThreadPoolExecutor, blob: PartialBlob) -> list[Future[None]]:
        return [pool.submit(self._fetch_range, blob, index) for index in range(blob.range_count)]

    def _second_try(self, pool: ThreadPoolExecutor, blob: PartialBlob) -> bool:
        """What an earlier process left may not have reached the disk before a power cut: fetch it all."""
        if not blob.is_resumed:
            return False
        blob.start_anew()
        self._count(-blob.file.size)
        return self._arrives_whole(blob, self._start(pool, blob))

    def _fetch_range(self, blob: PartialBlob, index: int) -> None:
        size = blob.range_size(index)
        if not blob.has_range(index):
            buffer = memoryview(bytearray(size))
            self._objects.read_into(blob_key(blob.file.sha256), index * RANGE_BYTES, buffer)
            blob.write_range(index, buffer)
        self._count(size)

    def _arrives_whole(self, blob: PartialBlob, ranges: Sequence[Future[None]]) -> bool:
        """Hashes the blob from the start while later ranges still arrive; whether the digest is right."""
        digest = hashlib.sha256()
        for index, arrival in enumerate(ranges):
            while not wait([arrival], REPORT_INTERVAL_S).done:
                self._report()
            arrival.result()
            for chunk in blob.read_range(index):
                digest.update(chunk)
            self._report()
        return digest.hexdigest() == blob.file.sha256

    def _count(self, size: int) -> None:
        with self._counting:
            self._unreported += size

    def _report(self) -> None:
        with self._counting:
            size, self._unreported = self._unreported, 0
        self._on_bytes(size)


class PartialBlob:
    """One blob on its way; makes or finds its files on disk."""

    def __init__(self, folder: Path, file: EngineFile) -> None:
        self.file = file
        self.range_count = -(-file.size // RANGE_BYTES)
        self._final = folder / file.sha256
        self._content = folder / f"{file.sha256}.partial"
        self._journal = folder / f"{file.sha256}.ranges"
        self._present = self._read_journal()
        self.is_resumed = any(self._present)
        if not self.is_resumed:
            self.start_anew()

    def start_anew(self) -> None:
        """Forgets what is there and reserves the whole space."""
        self.is_resumed = False
        self._present = bytes(self.range_count)
        self._journal.unlink(missing_ok=True)
        self._content.unlink(missing_ok=True)
        with self._content.open("wb") as content:
            if self.file.size:
                try:
                    os.posix_fallocate(content.fileno(), 0, self.file.size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    self._content.unlink()
                    raise PreconditionError(
                        "DISK_FULL",
                        str(self._final.parent),
                        f"no room for {self.file.size} bytes in {self._final.parent}",
                        size=self.file.size,
                    ) from error
        self._journal.write_bytes(self._present)

    def range_size(self, index: int) -> int:
        """Bytes of one range; the last one may be short."""
        return min(RANGE_BYTES, self.file.size - index * RANGE_BYTES)

    def has_range(self, index: int) -> bool:
        """Whether an earlier process left this range in its place."""
        return bool(self._present[index])

    def write_range(self, index: int, data: memoryview) -> None:
        """Puts a range in its place, then notes that it is there."""
        _write(self._content, index * RANGE_BYTES, data)
        _write(self._journal, index, memoryview(b"\x01"))

    def read_range(self, index: int) -> Iterator[memoryview]:
        """The bytes of a range that is in its place, in pieces that are good until the next one."""
        buffer = memoryview(bytearray(HASH_BYTES))
        remaining = self.range_size(index)
        with self._content.open("rb", buffering=0) as content:
            content.seek(index * RANGE_BYTES)
            while remaining:
                count = content.readinto(buffer[: min(remaining, HASH_BYTES)])
                if not count:
                    raise EOFError(f"{self._content} was cut off by someone else")
                yield buffer[:count]
                remaining -= count

    def seal(self) -> None:
        """Gives the blob its name, once its content has reached the disk; nobody may write to it then."""
        with self._content.open("rb") as content:
            os.fsync(content.fileno())
        self._content.chmod(0o444)
        self._content.rename(self._final)
        self._journal.unlink()

    def _read_journal(self) -> bytes:
        try:
            present = self._journal.read_bytes()
            is_ours = len(present) == self.range_count and self._content.stat().st_size == self.file.size
        except FileNotFoundError:
            is_ours = False
        return present if is_ours else b""


def _write(path: Path, offset: int, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        while data:
            count = os.pwrite(descriptor, data, offset)
            offset += count
            data = data[count:]
    finally:
        os.close(descriptor)
