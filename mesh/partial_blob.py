"""A blob on its way: its content so far, and a journal of what is there.

<sha256>.partial   the content; the whole space is reserved at the start
<sha256>.ranges    for each range eight bytes, little-endian: how many of its bytes are in place; then
                   the ETag of the version that they are of
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mesh.errors import PreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

    from mesh.manifest import EngineFile

MIB = 1 << 20
RANGE_BYTES = 32 * MIB
"""What one request asks for. Larger ranges cost the server less; smaller ones spread better."""

HASH_BYTES = 256 << 10
"""Read and hashed at once: small enough for the processor's cache."""

_COUNT = struct.Struct("<Q")


class PartialBlob:
    """One blob on its way; makes or finds its files on disk."""

    def __init__(self, folder: Path, file: EngineFile) -> None:
        self.file = file
        self.range_count = -(-file.size // RANGE_BYTES)
        self._final = folder / file.sha256
        self._content = folder / f"{file.sha256}.partial"
        self._journal = folder / f"{file.sha256}.ranges"
        self._present, self.etag = self._read_journal()
        self.is_resumed = any(self._present)
        if not self.is_resumed:
            self.start_anew(self.etag)

    def start_anew(self, etag: str) -> None:
        """Forgets what is there and reserves the whole space for a version of the blob."""
        self.is_resumed = False
        self.etag = etag
        self._present = [0] * self.range_count
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
        self._journal.write_bytes(bytes(_COUNT.size * self.range_count) + etag.encode())

    def expect_version(self, etag: str) -> None:
        """Keeps what is there only if it is of this version of the blob."""
        if self.etag != etag:
            self.start_anew(etag)

    def range_size(self, index: int) -> int:
        """Bytes of one range; the last one may be short."""
        return min(RANGE_BYTES, self.file.size - index * RANGE_BYTES)

    @contextmanager
    def open_range(self, index: int) -> Iterator[RangePlace]:
        """Where the rest of one range goes."""
        content = os.open(self._content, os.O_WRONLY)
        try:
            journal = os.open(self._journal, os.O_WRONLY)
            try:
                yield RangePlace(content, journal, index, self._present[index], self.range_size(index))
            finally:
                os.close(journal)
        finally:
            os.close(content)

    def open_for_reading(self) -> FileIO:
        """The content, for read_range."""
        return self._content.open("rb", buffering=0)

    def read_range(self, content: FileIO, index: int) -> Iterator[memoryview]:
        """The bytes of a range that is in its place, in pieces that are good until the next one."""
        buffer = memoryview(bytearray(HASH_BYTES))
        remaining = self.range_size(index)
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

    def _read_journal(self) -> tuple[list[int], str]:
        size = _COUNT.size * self.range_count
        try:
            journal = self._journal.read_bytes()
            is_ours = len(journal) >= size and self._content.stat().st_size == self.file.size
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            return [], ""
        counts = [count for (count,) in _COUNT.iter_unpack(journal[:size])]
        if any(count > self.range_size(index) for index, count in enumerate(counts)):
            return [], ""
        return counts, journal[size:].decode(errors="replace")


class RangePlace:
    """Where one range goes, and how much of it is there.

    Attributes:
        present: Bytes in place.
    """

    def __init__(self, content: int, journal: int, index: int, present: int, size: int) -> None:
        self.present = present
        self._content = content
        self._journal = journal
        self._index = index
        self._size = size

    @property
    def offset(self) -> int:
        """Of the first byte that is missing, in the blob."""
        return self._index * RANGE_BYTES + self.present

    @property
    def missing(self) -> int:
        """Bytes that are missing."""
        return self._size - self.present

    def append(self, data: memoryview) -> None:
        """Puts the next bytes in their place, then notes that they are there."""
        _write(self._content, self.offset, data)
        self.present += len(data)
        _write(self._journal, self._index * _COUNT.size, memoryview(_COUNT.pack(self.present)))


def _write(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        offset += count
        data = data[count:]
