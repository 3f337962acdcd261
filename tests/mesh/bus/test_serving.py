"""How models are served: kept in the store, known to Redis, made anew from the store."""

from __future__ import annotations

import pytest

from mesh.bus import keys
from mesh.bus.index import EngineIndex
from mesh.bus.serving import save
from mesh.engine_store import EngineStore
from mesh.model_fields import ServingSettings
from mesh.object_store import ObjectStore
from mesh.serving_store import ServingStore
from mesh.settings import MeshSettings
from mesh.store_layout import serving_key

PATIENT = ServingSettings(max_waiting_s=30, default_max_tokens=7)


@pytest.fixture
def index(redis):
    return EngineIndex(redis)


@pytest.fixture
def objects(store_settings, monkeypatch):
    for name, value in store_settings.items():
        monkeypatch.setenv(name, value)
    return ObjectStore.from_settings(MeshSettings())


async def test_saved_settings_are_in_store_and_index_and_announced(index, objects):
    before = await index.latest_event_id()

    await save(objects, index.serving, "m", PATIENT)

    assert await index.serving.of("m") == PATIENT
    assert ServingStore(objects).all() == {"m": PATIENT}
    assert await index.latest_event_id() != before


async def test_a_model_without_settings_has_the_defaults(index):
    assert await index.serving.of("m") == ServingSettings()


async def test_index_that_was_lost_is_made_from_the_store(index, objects, redis):
    await save(objects, index.serving, "m", PATIENT)
    await redis.flushall()
    await redis.hset(keys.MODEL_SERVING, "gone", "{}")

    await index.serving.rebuild(EngineStore(objects).objects)

    assert await index.serving.all() == {"m": PATIENT}


@pytest.mark.parametrize(
    "data", [b"no JSON", b'{"colour": "red"}', b'{"max_workers": -1}', b"x" * (65 << 10)]
)
async def test_a_record_that_cannot_be_read_hides_no_other(index, objects, redis, data):
    await save(objects, index.serving, "m", PATIENT)
    objects.put_bytes(serving_key("broken"), data)
    await redis.hset(keys.MODEL_SERVING, "broken", data)

    assert await index.serving.of("broken") == ServingSettings()
    assert await index.serving.all() == {"m": PATIENT}
    assert ServingStore(objects).all() == {"m": PATIENT}
