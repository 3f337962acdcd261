"""Engines on disk are whole and checked, shared, within the limit, and never taken from who uses them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh import engine_cache, partial_blob, range_reader, semconv
from mesh.engine_cache import EngineCache
from mesh.engine_store import EngineStore, blob_key
from mesh.errors import ExhaustedError, IntegrityError, PreconditionError
from tests import engines
from tests.conditions import until

KIB = 1 << 10
LIMIT = 1 << 20
SHARED = os.urandom(10 * KIB)


@pytest.fixture
def publish(store, tmp_path):
    """Publishes an engine of one shared file and one of its own; gives its manifest."""

    def publish(size: int = 100 * KIB, store: EngineStore = store, **files: bytes):
        files = {"tokenizer.json": SHARED, "weights/0": os.urandom(size), **files}
        manifest = engines.manifest(files)
        folder = engines.write(tmp_path / "sources" / manifest.digest, files)
        store.publish(manifest, folder)
        return manifest

    return publish


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_cache(folder):
    """Opens the cache as one more worker of this host."""
    opened = []

    def open_one(limit: int = LIMIT) -> EngineCache:
        opened.append(EngineCache(folder, limit))
        return opened[-1]

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture
def proxied(connect_store, proxy):
    """The store behind a proxy, and the proxy."""
    return EngineStore(connect_store(proxy.port)), proxy


@pytest.fixture
def _small_ranges(monkeypatch):
    monkeypatch.setattr(partial_blob, "RANGE_BYTES", 16 * KIB)
    monkeypatch.setattr(range_reader, "PIECE_BYTES", 4 * KIB)


@pytest.fixture
def spans(monkeypatch):
    """The spans that the cache makes."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(engine_cache, "_tracer", trace.get_tracer("test", tracer_provider=provider))
    return exporter


def is_right(path, manifest) -> bool:
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return found == {file.path for file in manifest.files} and all(
        engines.sha256((path / file.path).read_bytes()) == file.sha256 for file in manifest.files
    )


def digests(folder) -> set[str]:
    return {path.name for path in (folder / "engines").iterdir()}


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in (folder / "blobs").iterdir())


def test_fetched_engine_is_whole_and_in_its_folder(store, publish, open_cache, folder):
    manifest = publish()
    path = open_cache().fetch(store, manifest)

    assert path == folder / "engines" / manifest.digest
    assert is_right(path, manifest)
    assert {path.name for path in (folder / "blobs").iterdir()} == {file.sha256 for file in manifest.files}


def test_engine_that_is_here_needs_no_store(store, publish, open_cache, proxied):
    manifest = publish()
    path = open_cache().fetch(store, manifest)
    dead, proxy = proxied
    proxy.close()

    assert open_cache().fetch(dead, manifest) == path


def test_progress_goes_to_the_size_and_counts_what_is_here(store, publish, open_cache):
    first, second = publish(), publish()
    cache = open_cache()
    cache.fetch(store, first)
    seen = []
    cache.fetch(store, second, lambda done, total: seen.append((done, total)))

    assert seen[0] == (len(SHARED), second.size)
    assert seen[-1] == (second.size, second.size)
    assert seen == sorted(seen)


def test_engines_share_their_blobs(store, publish, open_cache, folder, objects):
    first, second = publish(), publish()
    cache = open_cache()
    cache.fetch(store, first)
    objects.delete(blob_key(engines.sha256(SHARED)))
    cache.fetch(store, second)

    files = [folder / "engines" / manifest.digest / "tokenizer.json" for manifest in (first, second)]
    assert files[0].samefile(files[1])


def test_same_content_under_two_names_is_one_blob(store, publish, open_cache, folder):
    manifest = publish(copy=SHARED, empty=b"", empty2=b"")
    seen = []
    path = open_cache().fetch(store, manifest, lambda *progress: seen.append(progress))

    assert is_right(path, manifest)
    assert seen[-1] == (manifest.size - len(SHARED), manifest.size - len(SHARED))


@pytest.mark.parametrize("damage", ["changed", "cut", "removed", "replaced", "stranger", "stranger's link"])
def test_damaged_engine_is_put_together_anew(store, publish, open_cache, folder, damage):
    manifest = publish()
    path = open_cache().fetch(store, manifest)
    weights = path / "weights" / "0"
    weights.chmod(0o600)
    if damage == "changed":
        with weights.open("r+b") as file:
            file.write(b"another beginning")
    elif damage == "cut":
        os.truncate(weights, 5)
    elif damage == "removed":
        weights.unlink()
    elif damage == "replaced":
        content = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(content[:-1] + b"!")
    elif damage == "stranger":
        (path / "more.py").write_text("import os")
    else:
        (path / "more").symlink_to("/etc")

    assert open_cache().fetch(store, manifest) == path
    assert is_right(path, manifest)
    assert not (path / "more").is_symlink()
    assert digests(folder) == {manifest.digest}


def test_damaged_blob_of_another_engine_is_not_used(store, publish, open_cache, folder):
    first, second = publish(), publish()
    cache = open_cache()
    path = cache.fetch(store, first)
    (path / "tokenizer.json").chmod(0o600)
    (path / "tokenizer.json").write_bytes(b"x" * len(SHARED))

    assert is_right(cache.fetch(store, second), second)


def test_damage_in_the_store_gives_no_engine(store, publish, open_cache, folder, objects):
    manifest = publish()
    file = manifest.file("weights/0")
    objects.put_bytes(blob_key(file.sha256), bytes(file.size))
    cache = open_cache()

    with pytest.raises(IntegrityError):
        cache.fetch(store, manifest)
    assert digests(folder) == set()
    objects.put_bytes(blob_key(file.sha256), b"mended")
    with pytest.raises(IntegrityError):
        cache.fetch(store, manifest)
    assert not (folder / "blobs" / file.sha256).exists()


def test_engine_used_longest_ago_is_evicted_first(store, publish, open_cache, folder):
    old, older, new = publish(400 * KIB), publish(400 * KIB), publish(400 * KIB)
    cache = open_cache()
    for used_at, manifest in ((2, old), (1, older)):
        os.utime(cache.fetch(store, manifest), (used_at, used_at))
        cache.release(manifest.digest)
    cache.fetch(store, new)

    assert digests(folder) == {old.digest, new.digest}
    assert size_of(folder) == 800 * KIB + len(SHARED) <= LIMIT


def test_fetching_again_makes_an_engine_the_last_used(store, publish, open_cache, folder):
    first, second, third = publish(400 * KIB), publish(400 * KIB), publish(400 * KIB)
    cache = open_cache()
    for manifest in (first, second):
        os.utime(cache.fetch(store, manifest), (1, 1))
        cache.release(manifest.digest)
    cache.fetch(store, first)
    cache.release(first.digest)
    cache.fetch(store, third)

    assert digests(folder) == {first.digest, third.digest}


def test_engine_in_use_is_not_evicted(store, publish, open_cache, folder):
    used, unused, new = publish(400 * KIB), publish(400 * KIB), publish(400 * KIB)
    worker, other = open_cache(), open_cache()
    os.utime(worker.fetch(store, used), (1, 1))
    other.fetch(store, unused)
    other.release(unused.digest)
    other.fetch(store, new)

    assert digests(folder) == {used.digest, new.digest}


def test_cache_full_of_engines_in_use_is_exhausted_until_one_is_released(store, publish, open_cache, folder):
    first, second = publish(600 * KIB), publish(600 * KIB)
    worker, other = open_cache(), open_cache()
    worker.fetch(store, first)

    with pytest.raises(ExhaustedError, match="ENGINEMESH_CACHE_LIMIT_BYTES"):
        other.fetch(store, second)
    assert digests(folder) == {first.digest}
    worker.release(first.digest)
    assert is_right(other.fetch(store, second), second)


def test_engine_larger_than_the_cache_is_refused_by_setting(store, publish, open_cache, folder):
    kept = publish(100 * KIB)
    cache = open_cache()
    cache.fetch(store, kept)
    cache.release(kept.digest)

    with pytest.raises(PreconditionError, match="ENGINEMESH_CACHE_LIMIT_BYTES") as raised:
        cache.fetch(store, publish(LIMIT))
    assert raised.value.reason == "CACHE_TOO_SMALL"
    assert digests(folder) == {kept.digest}


def test_leftovers_of_dead_processes_make_room(store, publish, open_cache, folder):
    cache = open_cache()
    (folder / "engines" / "dead.partial").mkdir()
    (folder / "blobs" / ("d" * 64)).write_bytes(bytes(500 * KIB))
    (folder / "blobs" / ("e" * 64 + ".partial")).write_bytes(bytes(500 * KIB))
    (folder / "blobs" / ("e" * 64 + ".ranges")).write_bytes(b"\x00")
    manifest = publish()
    cache.fetch(store, manifest)

    assert digests(folder) == {manifest.digest}
    assert {path.name for path in (folder / "blobs").iterdir()} == {file.sha256 for file in manifest.files}


def test_workers_that_want_one_engine_fetch_it_once(publish, open_cache, proxied):
    manifest = publish(900 * KIB)
    store, proxy = proxied
    with ThreadPoolExecutor(6) as pool:
        paths = list(pool.map(lambda cache: cache.fetch(store, manifest), [open_cache() for _ in range(6)]))

    assert len(set(paths)) == 1
    assert is_right(paths[0], manifest)
    assert manifest.size <= proxy.bytes_sent < 1.2 * manifest.size


def test_workers_that_want_many_engines_in_a_small_cache_each_get_theirs(store, publish, open_cache, folder):
    manifests = [publish(300 * KIB) for _ in range(6)]

    def work(manifest) -> None:
        cache = open_cache()
        for _ in range(4):
            while True:
                try:
                    path = cache.fetch(store, manifest)
                    break
                except ExhaustedError:  # three are in use; try again as a worker does
                    continue
            assert is_right(path, manifest)
            cache.release(manifest.digest)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, manifests))
    assert size_of(folder) <= LIMIT
    assert all(not name.endswith(".partial") for name in digests(folder))


@pytest.mark.usefixtures("_small_ranges")
def test_fetch_that_is_stopped_goes_on_later(publish, open_cache, proxied):
    manifest = publish(900 * KIB)
    store, proxy = proxied
    cache = open_cache()

    proxy.stall_after = manifest.size // 2

    def stop(*_) -> None:
        if proxy.is_stalled:
            proxy.go_on()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cache.fetch(store, manifest, stop)
    before = proxy.bytes_sent
    assert is_right(cache.fetch(store, manifest), manifest)
    assert proxy.bytes_sent - before < 0.7 * manifest.size


def test_waiting_for_another_worker_can_be_stopped(store, publish, open_cache):
    first, second = publish(), publish()
    is_fetching, may_go_on = threading.Event(), threading.Event()

    def hold(*_) -> None:
        is_fetching.set()
        may_go_on.wait(30)

    def stop(*_) -> None:
        raise InterruptedError

    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(open_cache().fetch, store, first, hold)
        assert is_fetching.wait(30)
        try:
            with pytest.raises(InterruptedError):
                open_cache().fetch(store, second, stop)
        finally:
            may_go_on.set()
        assert is_right(fetching.result(), first)


@pytest.mark.usefixtures("_small_ranges")
def test_fetch_for_later_gives_way_to_a_worker_that_waits(publish, open_cache, proxied):
    later, now = publish(400 * KIB), publish(100 * KIB)
    store, proxy = proxied
    proxy.stall_after = 200 * KIB
    with ThreadPoolExecutor(2) as pool:
        fetching = pool.submit(open_cache().fetch, store, later, gives_way=True)
        asyncio.run(until(lambda: proxy.is_stalled))
        is_waiting = threading.Event()
        urgent = pool.submit(open_cache().fetch, store, now, lambda *_: is_waiting.set())
        assert is_waiting.wait(30)
        proxy.go_on()
        with pytest.raises(ExhaustedError, match="needs an engine first"):
            fetching.result()
        assert is_right(urgent.result(), now)
    before = proxy.bytes_sent
    assert is_right(open_cache().fetch(store, later, gives_way=True), later)
    assert proxy.bytes_sent - before < 0.9 * later.size


def test_spans_tell_bytes_of_fetch_and_verify(store, publish, open_cache, spans):
    manifest = publish()
    cache = open_cache()
    cache.fetch(store, manifest)
    fetched = [span for span in spans.get_finished_spans() if span.name == "engine.fetch"]
    spans.clear()
    cache.fetch(store, manifest)
    verified = spans.get_finished_spans()

    assert [dict(span.attributes) for span in fetched] == [
        {semconv.ENGINE: manifest.digest, semconv.BYTES: manifest.size}
    ]
    assert [(span.name, dict(span.attributes)) for span in verified] == [
        ("engine.verify", {semconv.BYTES: manifest.size})
    ]


WORKER_PROGRAM = """
import sys
from pathlib import Path
from mesh import partial_blob, range_reader
from mesh.engine_cache import EngineCache
from mesh.engine_store import EngineStore
from mesh.object_store import ObjectStore
from mesh.settings import MeshSettings

partial_blob.RANGE_BYTES, range_reader.PIECE_BYTES = 16 << 10, 4 << 10
store = EngineStore(ObjectStore.from_settings(MeshSettings()))
cache = EngineCache(Path(sys.argv[1]), 1 << 20)
cache.fetch(store, store.manifest(sys.argv[2]))
print("fetched", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_worker(connect_store, store_settings, folder):
    """Starts a process that fetches an engine and keeps it in use."""
    started = []

    def start(manifest, port: int | None = None) -> subprocess.Popen:
        environment = {**os.environ, **store_settings, "ENGINEMESH_S3_BUCKET": connect_store()._bucket}
        if port:
            environment["ENGINEMESH_S3_ENDPOINT"] = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER_PROGRAM, str(folder), manifest.digest],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("_small_ranges")
def test_killed_fetch_leaves_no_lock_no_half_engine_and_is_resumed(
    publish, open_cache, start_worker, proxied, folder
):
    manifest = publish(900 * KIB)
    store, proxy = proxied
    proxy.stall_after = manifest.size // 2
    worker = start_worker(manifest, proxy.port)
    asyncio.run(until(lambda: proxy.is_stalled))
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert digests(folder) == set()

    proxy.go_on()
    before = proxy.bytes_sent
    assert is_right(open_cache().fetch(store, manifest), manifest)
    assert proxy.bytes_sent - before < 0.8 * manifest.size


def test_engine_of_a_process_is_kept_until_it_dies(store, publish, open_cache, start_worker, folder):
    used, new = publish(600 * KIB), publish(600 * KIB)
    worker = start_worker(used)
    assert worker.stdout.readline() == "fetched\n"
    cache = open_cache()

    with pytest.raises(ExhaustedError):
        cache.fetch(store, new)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    cache.fetch(store, new)
    assert digests(folder) == {new.digest}
