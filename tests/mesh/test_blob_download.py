"""A blob arrives whole and checked under its name, or not at all; what has arrived is not fetched twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from mesh import partial_blob, range_reader
from mesh.blob_download import BlobDownload
from mesh.engine_store import blob_key
from mesh.errors import IntegrityError, NotFoundError, PreconditionError, UnavailableError
from mesh.manifest import EngineFile
from mesh.partial_blob import MIB, PartialBlob
from tests import engines

RANGE = 64 << 10
SIZE = 20 * RANGE + 123


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch):
    monkeypatch.setattr(partial_blob, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(range_reader, "PIECE_BYTES", RANGE // 4)


@pytest.fixture
def put(objects):
    """Stores bytes as a blob; gives the file that stands for it in a manifest."""

    def put(data: bytes) -> EngineFile:
        digest = engines.sha256(data)
        objects.put_bytes(blob_key(digest), data)
        return EngineFile(path="f", size=len(data), sha256=digest)

    return put


@pytest.fixture
def content():
    return os.urandom(SIZE)


def ignore(_: int) -> None:
    pass


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", [0, 1, RANGE - 1, RANGE, RANGE + 1, 3 * RANGE])
def test_blob_arrives_under_its_digest(objects, put, tmp_path, size):
    data = os.urandom(size)
    file = put(data)
    BlobDownload(objects, tmp_path, ignore).run([file])

    assert names(tmp_path) == [file.sha256]
    assert (tmp_path / file.sha256).read_bytes() == data
    assert (tmp_path / file.sha256).stat().st_mode & 0o777 == 0o444


def test_many_blobs_arrive_together(objects, put, tmp_path):
    contents = [os.urandom(size) for size in (5, 3 * RANGE, 0, 10 * RANGE + 1)]
    files = [put(data) for data in contents]
    counts = []
    BlobDownload(objects, tmp_path, counts.append).run(files)

    assert [(tmp_path / file.sha256).read_bytes() for file in files] == contents
    assert sum(counts) == sum(file.size for file in files)


def stop_halfway(objects, proxy, folder, file) -> None:
    """Ends a download through a proxy when half of the blob has come."""
    proxy.stall_after = proxy.bytes_sent + SIZE // 2

    def stop(_: int) -> None:
        if proxy.is_stalled:
            proxy.go_on()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        BlobDownload(objects, folder, stop).run([file])


def missing_of(file: EngineFile, folder) -> int:
    """Bytes that an unfinished blob lacks."""
    there = PartialBlob(folder, file)
    missing = 0
    for index in range(there.range_count):
        with there.open_range(index) as place:
            missing += place.missing
    return missing


def test_download_goes_on_from_the_bytes_that_are_there(connect_store, put, proxy, tmp_path, content):
    file = put(content)
    behind = connect_store(proxy.port)
    stop_halfway(behind, proxy, tmp_path, file)
    assert names(tmp_path) == [f"{file.sha256}.partial", f"{file.sha256}.ranges"]

    missing = missing_of(file, tmp_path)
    before, counts = proxy.bytes_sent, []
    BlobDownload(behind, tmp_path, counts.append).run([file])
    assert (tmp_path / file.sha256).read_bytes() == content
    # What was on its way in the sockets comes again.
    assert missing <= proxy.bytes_sent - before < missing + 2 * RANGE
    assert 0.1 * SIZE < missing < 0.9 * SIZE
    assert sum(counts) == SIZE


def test_bytes_of_another_version_are_not_kept(connect_store, put, objects, proxy, tmp_path):
    # A damaged blob was mended in the store while a worker had half of it.
    content = os.urandom(SIZE)
    file = put(content)
    objects.put_bytes(blob_key(file.sha256), bytes(SIZE))
    behind = connect_store(proxy.port)
    stop_halfway(behind, proxy, tmp_path, file)
    objects.put_bytes(blob_key(file.sha256), content)
    before, counts = proxy.bytes_sent, []
    BlobDownload(behind, tmp_path, counts.append).run([file])

    assert (tmp_path / file.sha256).read_bytes() == content
    assert SIZE <= proxy.bytes_sent - before < 1.2 * SIZE
    assert sum(counts) == SIZE


def test_blob_that_changes_on_the_way_is_left_for_a_later_try(connect_store, put, objects, proxy, tmp_path):
    content = os.urandom(SIZE)
    file = put(content)
    behind = connect_store(proxy.port)
    behind.exists("connected")
    proxy.stall_after = proxy.bytes_sent + SIZE // 2

    def change(_: int) -> None:
        if proxy.is_stalled:
            objects.put_bytes(blob_key(file.sha256), content[::-1])
            proxy.go_on()

    with pytest.raises(UnavailableError, match="PreconditionFailed"):
        BlobDownload(behind, tmp_path, change).run([file])
    assert not (tmp_path / file.sha256).exists()
    objects.put_bytes(blob_key(file.sha256), content)
    BlobDownload(behind, tmp_path, ignore).run([file])
    assert (tmp_path / file.sha256).read_bytes() == content


def test_broken_transfers_are_mended_on_the_way(connect_store, put, proxy, tmp_path, content):
    file = put(content)
    behind = connect_store(proxy.port)
    behind.exists("connected")
    proxy.cut_after, proxy.cuts_left = RANGE // 2, 5
    BlobDownload(behind, tmp_path, ignore).run([file])

    assert (tmp_path / file.sha256).read_bytes() == content
    assert proxy.cuts_left == 0


def test_store_that_goes_away_ends_the_download_and_keeps_what_came(
    connect_store, put, proxy, tmp_path, content
):
    file = put(content)
    behind = connect_store(proxy.port)

    proxy.stall_after = proxy.bytes_sent + SIZE // 2

    def lose(_: int) -> None:
        if proxy.is_stalled:
            proxy.close()

    with pytest.raises(UnavailableError):
        BlobDownload(behind, tmp_path, lose).run([file])
    assert PartialBlob(tmp_path, file).is_resumed
    BlobDownload(connect_store(), tmp_path, ignore).run([file])
    assert (tmp_path / file.sha256).read_bytes() == content


def test_damaged_blob_in_the_store_gets_no_name(objects, put, tmp_path, content):
    file = put(content)
    objects.put_bytes(blob_key(file.sha256), content[:-1] + bytes([content[-1] ^ 1]))

    with pytest.raises(IntegrityError, match="another digest") as raised:
        BlobDownload(objects, tmp_path, ignore).run([file])
    assert raised.value.metadata["expected"] == file.sha256
    assert not (tmp_path / file.sha256).exists()


@pytest.mark.parametrize("size", [SIZE, RANGE])
def test_shorter_blob_in_the_store_gets_no_name(objects, put, tmp_path, size):
    content = os.urandom(size)
    file = put(content)
    objects.put_bytes(blob_key(file.sha256), content[:-1])

    with pytest.raises(IntegrityError):
        BlobDownload(objects, tmp_path, ignore).run([file])
    assert not (tmp_path / file.sha256).exists()


def test_missing_blob_is_not_found(objects, tmp_path):
    with pytest.raises(NotFoundError):
        BlobDownload(objects, tmp_path, ignore).run([EngineFile(path="f", size=1, sha256="0" * 64)])


def test_ranges_that_never_reached_the_disk_are_fetched_anew(objects, put, tmp_path, content):
    # After a power cut the journal may know of ranges whose content was lost.
    file = put(content)
    lying = PartialBlob(tmp_path, file)
    lying.expect_version(objects.stat(blob_key(file.sha256)).etag)
    for index in range(3):
        with lying.open_range(index) as place:
            place.append(memoryview(bytes(RANGE)))
    counts = []
    BlobDownload(objects, tmp_path, counts.append).run([file])

    assert (tmp_path / file.sha256).read_bytes() == content
    assert sum(counts) == SIZE


@pytest.mark.parametrize("left", [None, b"\x01" * 5, b"\xff" * 500])
@pytest.mark.parametrize("name", ["partial", "ranges"])
def test_torn_leftovers_are_not_trusted(objects, put, tmp_path, name, left):
    content = os.urandom(SIZE)
    file = put(content)
    with PartialBlob(tmp_path, file).open_range(0) as place:
        place.append(memoryview(bytes(RANGE)))
    path = tmp_path / f"{file.sha256}.{name}"
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    assert not PartialBlob(tmp_path, file).is_resumed
    BlobDownload(objects, tmp_path, ignore).run([file])

    assert (tmp_path / file.sha256).read_bytes() == content


def test_full_disk_is_told_before_anything_is_fetched(objects, tmp_path):
    free = os.statvfs(tmp_path)
    size = free.f_frsize * free.f_blocks * 2

    with pytest.raises(PreconditionError, match="no room for") as raised:
        BlobDownload(objects, tmp_path, ignore).run([EngineFile(path="f", size=size, sha256="0" * 64)])
    assert raised.value.reason == "DISK_FULL"
    assert names(tmp_path) == []


def test_waiting_is_reported_too(connect_store, put, proxy, tmp_path, content):
    file = put(content)
    behind = connect_store(proxy.port)
    behind.exists("connected")
    proxy.is_stalled = True
    counts = []

    def report(count: int) -> None:
        counts.append(count)
        if len(counts) == 3:
            proxy.go_on()

    BlobDownload(behind, tmp_path, report).run([file])
    assert counts[:3] == [0, 0, 0]


def test_no_threads_are_left(objects, put, tmp_path, content):
    BlobDownload(objects, tmp_path, ignore).run([put(content)])

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("blob-")]


MEMORY_PROGRAM = """
import re, sys
from pathlib import Path
from mesh.blob_download import BlobDownload
from mesh.manifest import EngineFile
from mesh.object_store import ObjectStore
from mesh.settings import MeshSettings

BlobDownload(ObjectStore.from_settings(MeshSettings()), Path(sys.argv[1]), lambda _: None).run(
    [EngineFile(path="f", size=int(sys.argv[2]), sha256=sys.argv[3])]
)
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10)
"""


def test_memory_stays_small_for_a_large_blob(connect_store, store_settings, put, tmp_path):
    data = os.urandom(MIB) * 320
    file = put(data)
    bucket = connect_store()._bucket
    answer = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path), str(file.size), file.sha256],
        env={**os.environ, **store_settings, "ENGINEMESH_S3_BUCKET": bucket},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )

    assert int(answer.stdout) < 300
