"""No sweep takes a blob from an engine, however publishers and collectors meet."""

from __future__ import annotations

import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from mesh import sweeps
from mesh.engine_store import EngineStore
from mesh.errors import NotFoundError, PreconditionError
from mesh.manifest import canonical_json
from mesh.store_layout import BLOBS, blob_key
from mesh.sweeps import References, sweep
from tests import engines

FILES = {"tokenizer.json": b"{}", "weights": b"weights"}


@pytest.fixture
def folder(tmp_path):
    return engines.write(tmp_path / "engine", FILES)


def blobs(objects) -> set[str]:
    return {entry.key.rpartition("/")[2] for entry in objects.list(BLOBS)}


def collect(objects) -> list[str]:
    """Sweeps every blob that is there."""
    return sweep(objects, References(objects), blobs(objects))


def of(manifest) -> set[str]:
    return {file.sha256 for file in manifest.files}


def test_only_what_no_manifest_names_is_removed(store, objects, folder):
    kept, gone = engines.manifest(FILES), engines.manifest(FILES | {"more": b"more"})
    store.publish(kept, folder)
    store.publish(gone, engines.write(folder, {"more": b"more"}))
    store.remove(gone.digest)

    assert collect(objects) == [engines.sha256(b"more")]
    assert blobs(objects) == of(kept)
    assert not list(objects.list("sweeps/"))


def test_sweep_of_many_blobs_goes_in_steps(objects, monkeypatch):
    monkeypatch.setattr(sweeps, "SWEEP_BLOBS", 3)
    names = [engines.sha256(b"%d" % number) for number in range(8)]
    for name in names:
        objects.put_bytes(blob_key(name), b"")

    assert sweep(objects, References(objects), names) == names
    assert blobs(objects) == set()


def test_blobs_of_a_publication_that_runs_are_kept(store, objects, folder):
    manifest = engines.manifest(FILES)
    sent = []

    def collect_meanwhile(done: int, total: int) -> None:
        assert collect(objects) == []
        sent.append(len(blobs(objects)))

    store.publish(manifest, folder, collect_meanwhile)

    assert sent == [0, 1]
    assert store.read_file(manifest, "weights", 100) == b"weights"


def test_publisher_waits_for_a_sweep_and_sends_again_what_it_took(store, objects, folder):
    # The worst moment: the blob is there, the collector has looked and not yet removed.
    objects.put_bytes(blob_key(engines.sha256(b"weights")), b"weights")
    manifest = engines.manifest(FILES)
    has_looked, is_waited_for = threading.Event(), threading.Event()

    class Slow(References):
        def read(self, without=()):
            needed = super().read(without)
            has_looked.set()
            assert is_waited_for.wait(30)
            return needed

    with ThreadPoolExecutor(2) as pool:
        sweeping = pool.submit(sweep, objects, Slow(objects), of(manifest))
        assert has_looked.wait(30)
        store.publish(manifest, folder, lambda done, total: is_waited_for.set())
        assert engines.sha256(b"weights") in sweeping.result()

    assert blobs(objects) == of(manifest)


def test_wait_for_a_sweep_can_be_stopped(store, objects, folder):
    manifest = engines.manifest(FILES)
    objects.put_bytes("sweeps/other", canonical_json(["0" * 64]))
    objects.put_bytes("sweeps/dead", canonical_json(sorted(of(manifest))))

    def stop(done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        store.publish(manifest, folder, stop)
    assert not list(objects.list("publishing/"))
    assert not list(objects.list("manifests/"))


def test_sweep_of_a_dead_collector_is_not_waited_for_longer_than_its_limit(
    store, objects, folder, monkeypatch
):
    monkeypatch.setattr(sweeps, "WAIT_LIMIT_S", 0.3)
    manifest = engines.manifest(FILES)
    objects.put_bytes("sweeps/dead", canonical_json(sorted(of(manifest))))
    store.publish(manifest, folder)

    assert store.manifest(manifest.digest) == manifest
    assert not objects.exists("sweeps/dead")


def test_collector_removes_nothing_after_its_time(objects, monkeypatch):
    # Who waited for it has gone on by then.
    monkeypatch.setattr(sweeps, "REMOVE_LIMIT_S", -1.0)
    objects.put_bytes(blob_key("0" * 64), b"")

    assert collect(objects) == []
    assert blobs(objects) == {"0" * 64}
    assert sweeps.REMOVE_LIMIT_S + 100 < sweeps.WAIT_LIMIT_S


def test_blobs_of_a_dead_publisher_go_after_a_time(objects, monkeypatch):
    objects.put_bytes(blob_key("0" * 64), b"")
    objects.put_bytes("publishing/" + "1" * 64 + "/dead", canonical_json(["0" * 64]))
    assert collect(objects) == []
    monkeypatch.setattr(sweeps, "ANNOUNCEMENT_LIFETIME", timedelta(0))

    assert collect(objects) == ["0" * 64]


def test_publisher_whose_announcement_is_taken_back_looks_again(store, objects, folder):
    # Another publisher of the same engine was done first, the engine was removed, and its blobs were swept.
    manifest = engines.manifest(FILES)
    first_try = iter([True])

    def interfere(done: int, total: int) -> None:
        if done == total and next(first_try, False):
            for entry in list(objects.list("publishing/")):
                objects.delete(entry.key)
            collect(objects)

    store.publish(manifest, folder, interfere)

    assert blobs(objects) == of(manifest)


def test_failed_publication_takes_back_what_it_sent_and_nobody_shares(store, objects, folder):
    store.publish(engines.manifest({"tokenizer.json": b"{}"}), folder)
    before = blobs(objects)

    def fail(done: int, total: int) -> None:
        if done == total:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        store.publish(engines.manifest(FILES), folder, fail)
    assert blobs(objects) == before


def test_damaged_manifest_stops_the_sweep_by_name(objects):
    objects.put_bytes(blob_key("0" * 64), b"")
    objects.put_bytes("manifests/" + "1" * 64 + ".json", b"scribble")

    with pytest.raises(PreconditionError, match="enginemesh delete 1111") as raised:
        collect(objects)
    assert raised.value.reason == "MANIFEST_DAMAGED"
    assert blobs(objects) == {"0" * 64}
    assert not list(objects.list("sweeps/"))


def test_blobs_of_manifests_of_a_later_version_are_kept(objects):
    later = json.dumps({"schema_version": 9, "parts": [{"digest": "0" * 64}]}).encode()
    objects.put_bytes(f"manifests/{engines.sha256(later)}.json", later)
    for name in ("0" * 64, "1" * 64):
        objects.put_bytes(blob_key(name), b"")

    assert collect(objects) == ["1" * 64]


def test_publishers_removers_and_collectors_never_leave_a_broken_engine(connect_store, tmp_path):
    common = [os.urandom(50) for _ in range(4)]
    choose = random.Random(4)
    made = []
    for number in range(24):
        files = {"tokenizer.json": b"{}", "a": choose.choice(common), "b": choose.choice(common)}
        manifest = engines.manifest(files)
        made.append((manifest, engines.write(tmp_path / str(number), files)))
    is_over = threading.Event()

    def collect_on_and_on() -> None:
        objects = connect_store()
        while not is_over.is_set():
            collect(objects)

    def publish(numbered) -> None:
        number, (manifest, folder) = numbered
        store = EngineStore(connect_store())
        store.publish(manifest, folder)
        if number % 3:
            store.remove(manifest.digest)

    with ThreadPoolExecutor(5) as pool:
        collectors = [pool.submit(collect_on_and_on) for _ in range(2)]
        try:
            with ThreadPoolExecutor(3) as publishers:
                list(publishers.map(publish, enumerate(made)))
        finally:
            is_over.set()
        for collector in collectors:
            collector.result()
    store = EngineStore(connect_store())
    for number, (manifest, _) in enumerate(made):
        if number % 3:
            with pytest.raises(NotFoundError):
                store.manifest(manifest.digest)
        else:
            for file in manifest.files:
                assert engines.sha256(store.read_file(manifest, file.path, 100)) == file.sha256
    assert not list(store.objects.list("publishing/"))
