"""The index agrees with what was added, and tells of every change."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from mesh.bus import keys
from mesh.bus.index import NO_EVENT, EngineIndex, Rebuilt, rebuild_index
from mesh.engine_store import EngineRecord
from mesh.signing import SigningKey
from tests import engines
from tests.conditions import until

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def index(redis):
    return EngineIndex(redis)


def record(model: str = "m", minutes: int = 0) -> EngineRecord:
    return EngineRecord(engines.manifest(model=model), NOON + timedelta(minutes=minutes, milliseconds=7))


class ListedStore:
    """A store that lists what it is told to, and lets something happen meanwhile."""

    def __init__(self, records, meanwhile=lambda: None) -> None:
        self._records = records
        self._meanwhile = meanwhile

    @property
    def objects(self):
        """A store without serving settings."""
        return SimpleNamespace(list=lambda prefix: [])

    def engines(self):
        self._meanwhile()
        return self._records


async def test_added_engines_come_back_newest_first(index):
    old, new, other = record(minutes=1), record(minutes=2), record("other", minutes=3)
    for each in (new, old, other):
        await index.add(each)

    assert await index.engines("m") == [new, old]
    assert await index.engines() == [other, new, old]
    assert await index.models() == ["m", "other"]


async def test_empty_index_is_empty(index):
    assert await index.engines() == []
    assert await index.engines("m") == []
    assert await index.models() == []
    assert await index.latest_event_id() == NO_EVENT


async def test_adding_again_replaces(index):
    first = record()
    await index.add(first)
    later = EngineRecord(first.manifest, NOON + timedelta(days=1))
    await index.add(later)

    assert await index.engines() == [later]


async def test_model_goes_with_its_last_engine(redis, index):
    first, second = record(), record()
    await index.add(first)
    await index.add(second)
    await index.remove(first)
    assert await index.models() == ["m"]
    await index.remove(second)
    await index.remove(second)  # harmless to repeat

    assert await index.models() == []
    assert await redis.keys("*") == [keys.INDEX_EVENTS.encode()]


async def test_entry_that_is_no_manifest_hides_no_other(redis, index):
    good = record()
    await index.add(good)
    await redis.hset(keys.model_engines("m"), "0" * 64, b'{"create_time_ms":0,"manifest":{"from":"later"}}')

    assert await index.engines("m") == [good]


async def test_wait_gives_the_last_change_since(index):
    await index.add(record())
    seen = await index.latest_event_id()
    await index.add(record())
    await index.add(record())

    assert await index.wait_for_change(seen, 5) == await index.latest_event_id()


async def test_wait_wakes_up_when_something_is_added(redis, index):
    seen = await index.latest_event_id()
    waiting = asyncio.ensure_future(index.wait_for_change(seen, 5))
    await until(lambda: _has_blocked_client(redis))
    await index.add(record())

    assert await waiting == await index.latest_event_id()


async def test_wait_ends_with_none_if_nothing_changes(index):
    await index.add(record())

    assert await index.wait_for_change(await index.latest_event_id(), 0.01) is None


async def test_wait_tells_of_lost_data(redis, index):
    await index.add(record())
    seen = await index.latest_event_id()
    await redis.flushall()

    assert await index.wait_for_change(seen, 0.01) == NO_EVENT
    assert await index.wait_for_change(NO_EVENT, 0.01) is None


async def test_events_are_bounded(redis, index):
    one = record()
    for _ in range(300):
        await index.add(one)

    assert await redis.xlen(keys.INDEX_EVENTS) <= 100


async def test_rebuild_makes_the_index_what_the_store_is(index):
    kept, gone, new = record(), record("gone"), record("new")
    await index.add(kept)
    await index.add(gone)
    seen = await index.latest_event_id()

    assert await rebuild_index(ListedStore([kept, new]), index) == Rebuilt(2, (new,), (gone,))
    assert {each.digest for each in await index.engines()} == {kept.digest, new.digest}
    assert await index.models() == ["m", "new"]
    assert await index.wait_for_change(seen, 5) is not None


async def test_index_is_whole_from_a_rebuild_until_redis_loses_it(redis, index):
    await index.add(record())
    assert not await index.is_whole()
    await rebuild_index(ListedStore([record()]), index)
    assert await index.is_whole()
    await redis.flushall()
    await index.add(record("another"))
    assert not await index.is_whole()


async def test_signatures_come_back(index):
    unsigned = record()
    keys_ = [SigningKey.generate() for _ in range(2)]
    signatures = tuple(key.sign(unsigned.manifest.to_bytes()) for key in keys_)
    signed = EngineRecord(unsigned.manifest, NOON, signatures)
    await index.add(signed)

    assert await index.engines() == [signed]


async def test_rebuild_keeps_what_is_added_meanwhile(index):
    meanwhile = record()
    loop = asyncio.get_running_loop()

    def publish() -> None:  # after the store was asked, in the thread that asks it
        asyncio.run_coroutine_threadsafe(index.add(meanwhile), loop).result(10)

    await rebuild_index(ListedStore([], publish), index)

    assert await index.engines() == [meanwhile]


async def _has_blocked_client(redis) -> bool:
    return (await redis.info("clients"))["blocked_clients"] > 0
