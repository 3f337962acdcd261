"""Garbage collection removes what nothing names, and nothing else."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest

from enginemesh.v1 import workers_pb2
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.engine_removal import EngineRemover
from mesh.engine_store import EngineRecord, EngineStore
from mesh.errors import PreconditionError
from mesh.garbage import GarbageCollector, Retention, surplus
from mesh.manifest import canonical_json
from mesh.signing import SigningKey
from mesh.store_layout import blob_key
from tests import engines

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
AT_ONCE = timedelta(0)


def record(days: float, **fields) -> EngineRecord:
    return EngineRecord(engines.manifest(**fields), NOW - timedelta(days=days))


def test_newest_of_each_model_kind_and_target_are_kept():
    wider = engines.TARGET.model_copy(update={"instruction_set": "amx"})
    groups = [{}, {"model": "other"}, {"target": wider}, {"kind": "openvino"}]
    by_group = [[record(days, **fields) for days in (4, 5, 6, 7)] for fields in groups]
    mixed = [each for same_age in zip(*by_group, strict=True) for each in same_age]

    gone = surplus(mixed, Retention(newest=2), NOW)
    assert {each.digest for each in gone} == {each.digest for group in by_group for each in group[2:]}
    assert surplus(mixed, Retention(newest=4), NOW) == []


def test_young_engines_are_kept_however_many():
    records = [record(days) for days in (0.1, 0.2, 0.9, 1.1)]

    assert surplus(records, Retention(newest=0, min_age=timedelta(days=1)), NOW) == records[3:]


@pytest.fixture
def store(objects):
    return EngineStore(objects, SigningKey.generate())


@pytest.fixture
def collector(store, redis):
    """Makes a collector that keeps the newest engine, whatever its age."""

    def make(newest: int = 1, min_age: timedelta = AT_ONCE) -> GarbageCollector:
        remover = EngineRemover(store, redis, settle_s=0.05)
        return GarbageCollector(remover, Retention(newest, min_age))

    return make


@pytest.fixture
def publish(store, redis, tmp_path):
    """Publishes an engine with a file of its own and a shared one; its record."""

    async def make(own: bytes, **fields) -> EngineRecord:
        files = {"tokenizer.json": b"{}", "own": own}
        manifest = engines.manifest(files, **fields)
        folder = engines.write(tmp_path / own.decode(), files)
        await asyncio.to_thread(store.publish, manifest, folder)
        made = store.record(manifest.digest)
        await EngineIndex(redis).add(made)
        return made

    return make


def keys(objects) -> set[str]:
    return {entry.key for entry in objects.list("")}


async def test_surplus_engine_goes_with_all_that_is_its_alone(collector, publish, objects, redis):
    other = await publish(b"other", model="other")
    kept_only = keys(objects)
    gone = await publish(b"gone")
    garbage = await collector(newest=0).find()
    assert {each.digest for each in garbage.engines.removed} == {gone.digest, other.digest}
    await _use(redis, other)
    collected = await collector(newest=0).collect()

    assert [each.digest for each in collected.engines.removed] == [gone.digest]
    assert collected.engines.kept == [(other, "worker w1 uses it")]
    assert collected.blobs == {engines.sha256(b"gone"): 4}
    assert keys(objects) == kept_only


async def _use(redis, record: EngineRecord) -> None:
    info = workers_pb2.Worker(engine=f"engines/{record.digest}").SerializeToString()
    await Leases(redis, WORKER).renew("w1", info, 60)


async def test_dry_run_tells_what_would_go_and_removes_nothing(collector, publish, objects):
    gone = await publish(b"gone")
    objects.put_bytes(blob_key("0" * 64), b"loose")
    before = keys(objects)
    garbage = await collector(newest=0).find()

    assert [each.digest for each in garbage.engines.removed] == [gone.digest]
    assert garbage.blobs == {engines.sha256(b"gone"): 4, engines.sha256(b"{}"): 2, "0" * 64: 5}
    assert keys(objects) == before


async def test_what_is_young_stays(collector, publish, objects):
    await publish(b"young")
    objects.put_bytes(blob_key("0" * 64), b"loose")
    objects.put_bytes("signatures/" + "0" * 64 + "/k.json", b"")
    before = keys(objects)
    collected = await collector(newest=0, min_age=timedelta(hours=1)).collect()

    assert (collected.engines.removed, collected.blobs, collected.leftovers) == ([], {}, [])
    assert keys(objects) == before


async def test_leftovers_of_engines_that_are_gone_go(collector, publish, objects):
    await publish(b"kept")
    before = keys(objects)
    leftovers = {
        "signatures/" + "0" * 64 + "/k.json": b"",
        "models/m/" + "0" * 64: b"",
        "builds/" + "1" * 64: b"0" * 64,
    }
    for key, content in leftovers.items():
        objects.put_bytes(key, content)

    assert set((await collector().collect()).leftovers) == leftovers.keys()
    assert keys(objects) == before


async def test_signature_of_an_engine_that_is_being_published_stays(collector, objects):
    digest = "0" * 64
    objects.put_bytes(f"publishing/{digest}/p", canonical_json([]))
    objects.put_bytes(f"signatures/{digest}/k.json", b"")

    assert (await collector().collect()).leftovers == []


async def test_publication_that_runs_meanwhile_is_whole(collector, store, objects, tmp_path):
    files = {"tokenizer.json": b"{}", "own": b"own"}
    manifest = engines.manifest(files)
    folder = engines.write(tmp_path, files)
    loop = asyncio.get_running_loop()
    runs = []

    def collect(done: int, total: int) -> None:
        # With no minimum age: what keeps the blobs is that their publication was announced.
        runs.append(asyncio.run_coroutine_threadsafe(collector(newest=0).collect(), loop).result(30))

    await asyncio.to_thread(store.publish, manifest, folder, collect)

    assert len(runs) == 2
    assert store.read_file(manifest, "own", 10) == b"own"
    assert store.record(manifest.digest).signatures


async def test_damaged_manifest_stops_it_before_anything_goes(collector, publish, objects):
    await publish(b"gone")
    objects.put_bytes("manifests/" + "1" * 64 + ".json", b"scribble")
    before = keys(objects)
    for run in (collector(newest=0).collect, collector(newest=0).find):
        with pytest.raises(PreconditionError, match="enginemesh delete"):
            await run()

    assert keys(objects) == before


async def test_settings_of_models_and_other_objects_are_left_alone(collector, objects):
    for key in ("serving/m.json", "logs/b1", "scratch/b1/attempt.json"):
        objects.put_bytes(key, b"")
    before = keys(objects)
    await collector().collect()

    assert keys(objects) == before
