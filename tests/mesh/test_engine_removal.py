"""An engine that somebody uses, or is about to use, is not removed."""

from __future__ import annotations

import asyncio

import pytest

from enginemesh.v1 import builds_pb2, workers_pb2
from mesh.bus.builds import BuildQueue
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.engine_removal import EngineRemover
from mesh.errors import NotFoundError, PreconditionError
from tests import engines

FILES = {"tokenizer.json": b"{}"}


@pytest.fixture
def remover(store, redis):
    return EngineRemover(store, redis, settle_s=0.05)


@pytest.fixture
def publish(store, redis, tmp_path):
    """Publishes an engine, in store and index; its record."""
    folder = engines.write(tmp_path / "engine", FILES)

    async def make(**fields):
        manifest = engines.manifest(FILES, **fields)
        await asyncio.to_thread(store.publish, manifest, folder)
        record = store.record(manifest.digest)
        await EngineIndex(redis).add(record)
        return record

    return make


@pytest.fixture
def lease(redis):
    """Has a worker say that it uses an engine."""

    async def renew(digest: str) -> None:
        info = workers_pb2.Worker(name="workers/w1", engine=f"engines/{digest}")
        await Leases(redis, WORKER).renew("w1", info.SerializeToString(), 60)

    return renew


async def found(remover, redis) -> set[str]:
    """Engines that the index has; store, index and markers must agree on them."""
    records = await EngineIndex(redis).engines()
    stored = await asyncio.to_thread(remover.store.engines)
    assert {record.digest for record in records} == {record.digest for record in stored}
    for record in records:
        assert remover.store.find_build(record.manifest.build_key) == record.digest
    return {record.digest for record in records}


async def test_unused_engine_goes_from_store_and_index(remover, publish, redis):
    gone, kept = await publish(), await publish()
    result = await remover.remove([gone])

    assert (result.removed, result.kept) == ([gone], [])
    assert await found(remover, redis) == {kept.digest}
    assert remover.store.find_build(gone.manifest.build_key) is None


async def test_engine_of_a_worker_stays(remover, publish, redis, lease):
    used = await publish()
    await lease(used.digest)

    assert (await remover.remove([used])).kept == [(used, "worker w1 uses it")]
    with pytest.raises(PreconditionError, match="worker w1 uses it") as raised:
        await remover.remove_one(used.digest)
    assert raised.value.reason == "ENGINE_IN_USE"
    assert await found(remover, redis) == {used.digest}


async def test_engines_of_a_model_that_is_being_built_stay(remover, publish, redis):
    used, other = await publish(), await publish(model="other")
    operation = await BuildQueue(redis).create(
        builds_pb2.ModelSpec(model="m", kind="fake"), engines.TARGET.to_proto()
    )
    result = await remover.remove([used, other])

    assert result.removed == [other]
    assert [(record, operation.name.rpartition("/")[2] in why) for record, why in result.kept] == [
        (used, True)
    ]
    await BuildQueue(redis).cancel(operation.name.rpartition("/")[2])
    assert (await remover.remove([used])).removed == [used]


async def test_worker_that_chose_it_before_it_went_out_of_sight_keeps_it(remover, publish, redis, lease):
    record = await publish()
    store_hide = remover.store.hide

    def hide_after_choice(manifest) -> None:
        store_hide(manifest)
        asyncio.run_coroutine_threadsafe(lease(record.digest), loop).result(10)

    loop = asyncio.get_running_loop()
    remover.store.hide = hide_after_choice
    result = await remover.remove([record])

    assert result.kept == [(record, "worker w1 uses it")]
    assert await found(remover, redis) == {record.digest}


async def test_build_that_found_it_before_it_went_out_of_sight_keeps_it(remover, publish, redis):
    record = await publish()
    remover._settle_s = 0.5
    index = EngineIndex(redis)
    since = await index.latest_event_id()
    removing = asyncio.ensure_future(remover.remove([record]))
    await index.wait_for_change(since, 5)
    await index.add(record)

    assert (await removing).kept == [(record, "it has just been found again")]
    assert await found(remover, redis) == {record.digest}


async def test_unknown_engine_is_not_found(remover, redis):
    with pytest.raises(NotFoundError, match="no engine named"):
        await remover.remove_one("0" * 64)


async def test_engine_with_a_damaged_manifest_can_be_removed(remover, publish, redis, objects):
    record = await publish()
    await EngineIndex(redis).remove(record)
    objects.put_bytes(f"manifests/{record.digest}.json", b"scribble")
    await remover.remove_one(record.digest)

    assert [entry.key for entry in objects.list("m")] == []


async def test_engine_that_the_store_lost_goes_from_the_index(remover, publish, redis):
    record = await publish()
    remover.store.remove(record.digest)
    await remover.remove_one(record.digest)

    assert await found(remover, redis) == set()
