"""Objects come back as they were put, and every fault of the store becomes an error that says what to do."""

from __future__ import annotations

import http.server
import io
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest

from mesh import object_store
from mesh.errors import IntegrityError, NotFoundError, PreconditionError, UnavailableError
from mesh.object_store import PART_BYTES, ObjectStore
from mesh.partial_blob import MIB
from mesh.settings import MeshSettings

LARGE = 2 * PART_BYTES + 12_345


@pytest.fixture(scope="module")
def large():
    return os.urandom(LARGE)


def test_bytes_come_back(objects):
    objects.put_bytes("a/b", b"some bytes")

    assert objects.get_bytes("a/b", limit=10) == b"some bytes"


def test_empty_object_comes_back(objects):
    objects.put_bytes("empty", b"")

    assert objects.get_bytes("empty", limit=0) == b""
    assert objects.stat("empty").size == 0


def test_put_replaces(objects):
    objects.put_bytes("k", b"first")
    objects.put_bytes("k", b"second")

    assert objects.get_bytes("k", limit=100) == b"second"


def test_large_file_goes_and_comes_in_parts(objects, large, tmp_path):
    objects.put_bytes("large", large)
    objects.get_file("large", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == large
    # Field case 34: such an ETag is no MD5, so nothing may check content by it.
    assert re.fullmatch(r"[0-9a-f]{32}-3", objects.stat("large").etag)


def test_ranges_fill_a_buffer(objects, large):
    objects.put_bytes("large", large)
    buffer = bytearray(MIB)
    for offset in (0, 1, PART_BYTES - 7, LARGE - MIB):
        objects.read_into("large", offset, memoryview(buffer))
        assert buffer == large[offset : offset + MIB]
    objects.read_into("large", 5, memoryview(bytearray()))


@pytest.mark.parametrize(("offset", "length"), [(5, 6), (10, 1), (99, 1), (0, 11)])
def test_range_beyond_the_end_is_an_integrity_error(objects, offset, length):
    objects.put_bytes("k", b"0123456789")

    with pytest.raises(IntegrityError, match="object k is shorter"):
        objects.read_into("k", offset, memoryview(bytearray(length)))


def test_stat_tells_size_time_and_version(objects):
    before = datetime.now(timezone.utc) - timedelta(seconds=2)
    objects.put_bytes("k", b"first")
    first = objects.stat("k")
    objects.put_bytes("k", b"second!")
    second = objects.stat("k")

    assert (first.key, first.size, second.size) == ("k", 5, 7)
    assert before < first.last_modified <= second.last_modified < before + timedelta(minutes=5)
    assert first.etag != second.etag


def test_list_gives_all_below_a_prefix_in_order(objects):
    for key in ("x/2", "x/1/deep", "xy", "y"):
        objects.put_bytes(key, key.encode())

    assert [(entry.key, entry.size) for entry in objects.list("x/")] == [("x/1/deep", 8), ("x/2", 3)]
    assert list(objects.list("none/")) == []
    assert all(entry.last_modified.tzinfo for entry in objects.list(""))


def test_list_goes_over_pages(objects):
    keys = [f"many/{number:04}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: objects.put_bytes(key, b""), keys))

    assert [entry.key for entry in objects.list("many/")] == keys


def test_deleted_object_is_gone(objects):
    objects.put_bytes("k", b"")
    objects.delete("k")
    objects.delete("k")  # harmless to repeat

    assert not objects.exists("k")


def test_missing_object_is_not_found(objects, tmp_path):
    calls = (
        lambda: objects.stat("none"),
        lambda: objects.get_bytes("none", limit=1),
        lambda: objects.get_file("none", tmp_path / "f"),
        lambda: objects.read_into("none", 0, memoryview(bytearray(1))),
    )
    for call in calls:
        with pytest.raises(NotFoundError, match="no object named 'none'"):
            call()
    assert not (tmp_path / "f").exists()


def test_object_above_the_limit_is_refused_by_name(objects):
    objects.put_bytes("k", b"0123456789")

    with pytest.raises(PreconditionError, match="object k has 10 bytes; the limit is 9") as raised:
        objects.get_bytes("k", limit=9)
    assert raised.value.reason == "OBJECT_TOO_LARGE"


def test_put_if_absent_stores_once(objects):
    assert objects.put_if_absent("k", b"first")
    assert not objects.put_if_absent("k", b"second")

    assert objects.get_bytes("k", limit=100) == b"first"


def test_one_of_many_racers_stores(objects):
    barrier = threading.Barrier(8)

    def race(number: int) -> bool:
        barrier.wait(30)
        return objects.put_if_absent("prize", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert objects.get_bytes("prize", limit=1) == b"%d" % won.index(True)


@pytest.mark.parametrize("size", [100, PART_BYTES + 100])
def test_stream_that_fails_at_its_last_byte_stores_nothing(objects, size):
    class Bad(io.BytesIO):
        def read(self, count: int = -1) -> bytes:
            data = super().read(count)
            if self.tell() == size:
                raise IntegrityError("bad end")
            return data

    with pytest.raises(IntegrityError, match="bad end"):
        objects.put_stream("k", Bad(bytes(size)), size)
    assert not objects.exists("k")


def test_many_clients_make_one_bucket(connect_store):
    clients = [connect_store() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda numbered: numbered[1].put_bytes(f"k{numbered[0]}", b""), enumerate(clients)))

    assert len(list(clients[0].list("k"))) == 8


def test_connections_are_used_again(objects):
    objects.put_bytes("k", bytes(100))
    for _ in range(20):
        objects.get_bytes("k", limit=100)
        objects.read_into("k", 10, memoryview(bytearray(20)))

    pools = [objects._http.pools.get(key) for key in objects._http.pools.keys()]  # noqa: SIM118 - no mapping
    assert [pool.num_connections for pool in pools] == [1]
    assert [len(idle) for idle in objects._reader._idle.values()] == [1]


def test_settings_name_the_store(store_settings, monkeypatch):
    for name, value in store_settings.items():
        monkeypatch.setenv(name, value)
    objects = ObjectStore.from_settings(MeshSettings())
    objects.put_bytes("k", b"here")

    assert objects.get_bytes("k", limit=4) == b"here"


def test_transfer_that_breaks_off_goes_on_where_it_stopped(connect_store, objects, proxy, large):
    objects.put_bytes("large", large)
    behind = connect_store(proxy.port)
    behind.exists("large")
    proxy.cut_after, proxy.cuts_left = LARGE // 3, 3
    before = proxy.bytes_sent
    buffer = bytearray(LARGE)
    behind.read_into("large", 0, memoryview(buffer))

    assert buffer == large
    assert proxy.cuts_left == 0
    assert proxy.bytes_sent - before < LARGE * 1.1


def test_connections_that_the_server_ended_are_replaced(connect_store, objects, proxy):
    objects.put_bytes("k", bytes(MIB))
    behind = connect_store(proxy.port)
    behind.exists("k")

    def read(_) -> None:
        behind.read_into("k", 0, memoryview(bytearray(MIB)))

    proxy.is_stalled = True
    with ThreadPoolExecutor(8) as pool:
        reading = pool.map(read, range(8))
        proxy.wait_for_connections(9)
        proxy.go_on()
        list(reading)
    proxy.cut_all()
    read(None)


def test_reads_ask_for_one_version_of_an_object(objects):
    objects.put_bytes("k", b"first")
    etag = objects.stat("k").etag
    seen = []
    objects.read_range("k", 1, 4, lambda piece: seen.append(bytes(piece)), etag)
    assert b"".join(seen) == b"irst"
    objects.put_bytes("k", b"other")

    with pytest.raises(UnavailableError, match="PreconditionFailed"):
        objects.read_range("k", 1, 4, seen.append, etag)


def test_transfer_that_always_breaks_off_ends(connect_store, objects, proxy):
    objects.put_bytes("k", bytes(MIB))
    behind = connect_store(proxy.port)
    behind.exists("k")
    proxy.cut_after, proxy.cuts_left = 0, 1_000_000

    with pytest.raises(UnavailableError):
        behind.read_into("k", 0, memoryview(bytearray(MIB)))
    assert proxy.cuts_left > 1_000_000 - 50


def test_upload_that_breaks_off_is_sent_again(connect_store, proxy, large):
    behind = connect_store(proxy.port)
    behind.exists("first")
    proxy.cut_after, proxy.cuts_left = 0, 2
    behind.put_bytes("large", large)
    assert proxy.cuts_left == 0

    proxy.cut_after, proxy.cuts_left = 0, 1
    assert behind.put_if_absent("large", b"") is False
    assert behind.get_bytes("large", limit=LARGE) == large


def test_store_that_stalls_is_unavailable_within_its_time(connect_store, objects, proxy):
    objects.put_bytes("k", bytes(MIB))
    behind = connect_store(proxy.port, read_timeout_s=0.1)
    proxy.is_stalled = True

    with pytest.raises(UnavailableError, match="ENGINEMESH_S3_ENDPOINT") as raised:
        behind.read_into("k", 0, memoryview(bytearray(MIB)))
    assert raised.value.metadata["endpoint"] == f"127.0.0.1:{proxy.port}"
    proxy.go_on()
    assert behind.get_bytes("k", limit=MIB) == bytes(MIB)


def test_closed_port_is_unavailable_and_no_key_leaks(connect_store, proxy):
    behind = connect_store(proxy.port, secret_key="s3cret", access_key="acc3ss")
    proxy.close()
    calls = (
        lambda: behind.put_bytes("k", b""),
        lambda: behind.put_if_absent("k", b""),
        lambda: behind.get_bytes("k", limit=1),
        lambda: list(behind.list("")),
    )
    behind._bucket_exists = True
    for call in calls:
        with pytest.raises(UnavailableError, match="ENGINEMESH_S3_ENDPOINT") as raised:
            call()
        assert_no_key_in(raised.value, "s3cret", "acc3ss")


def test_server_that_speaks_no_s3_is_unavailable(connect_store, valkey):
    port = int(valkey.settings["ENGINEMESH_REDIS_URL"].rsplit(":", 1)[1].removesuffix("/0"))

    with pytest.raises(UnavailableError, match="ENGINEMESH_S3_ENDPOINT"):
        connect_store(port).stat("k")


@pytest.mark.parametrize("keys", [{"access_key": "acc3ss"}, {"secret_key": "s3cret"}])
def test_wrong_keys_are_denied_and_named_by_setting(connect_store, keys):
    with pytest.raises(PreconditionError, match="ENGINEMESH_S3_ACCESS_KEY") as raised:
        connect_store(**keys).put_bytes("k", b"")
    assert raised.value.reason == "STORE_ACCESS_DENIED"
    assert_no_key_in(raised.value, *keys.values())


def test_server_errors_are_tried_again_then_unavailable(connect_store, httpserver_503):
    behind = connect_store(httpserver_503.port)

    for call in (lambda: behind.stat("k"), lambda: behind.read_into("k", 0, memoryview(bytearray(9)))):
        httpserver_503.calls = 0
        with pytest.raises(UnavailableError, match="503"):
            call()
        assert httpserver_503.calls == object_store.ATTEMPTS


def assert_no_key_in(error: BaseException, *keys: str) -> None:
    seen = error
    while seen is not None:
        for key in keys:
            assert key not in f"{seen!s} {seen!r} {getattr(seen, 'metadata', '')}"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


@pytest.fixture
def httpserver_503():
    """A server that is always too busy."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            server.calls += 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815 - http.server gives the name

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.calls = 0
    server.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
