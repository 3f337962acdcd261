"""How each model is served, as Redis knows it. The store is the truth."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mesh.bus import keys
from mesh.model_fields import ServingSettings
from mesh.serving_store import ServingStore, decode, encode

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from mesh.object_store import ObjectStore

EVENTS_KEPT = 100


class ServingIndex:
    """The settings of every model that has some."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def of(self, model: str) -> ServingSettings:
        """A model's settings; the defaults if it has none."""
        value: Any = await self._redis.hget(keys.MODEL_SERVING, model)
        return (value and decode(value, model)) or ServingSettings()

    async def all(self) -> dict[str, ServingSettings]:
        """The settings of every model that has some."""
        values: Any = await self._redis.hgetall(keys.MODEL_SERVING)
        decoded = {name.decode(): decode(value, name.decode()) for name, value in values.items()}
        return {model: settings for model, settings in decoded.items() if settings is not None}

    async def put(self, model: str, settings: ServingSettings) -> None:
        """Takes a model's settings in, and tells whoever watches the index."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.MODEL_SERVING, model, encode(settings))
            pipe.xadd(keys.INDEX_EVENTS, {"changed": 1}, maxlen=EVENTS_KEPT)
            await pipe.execute()

    async def rebuild(self, objects: ObjectStore) -> None:
        """Makes the index agree with the store; what others put meanwhile is kept."""
        known: Any = await self._redis.hkeys(keys.MODEL_SERVING)
        stored = await asyncio.to_thread(ServingStore(objects).all)
        gone = [model for model in known if model.decode() not in stored]
        async with self._redis.pipeline(transaction=True) as pipe:
            for model, settings in stored.items():
                pipe.hset(keys.MODEL_SERVING, model, encode(settings))
            if gone:
                pipe.hdel(keys.MODEL_SERVING, *gone)
            await pipe.execute()


async def save(objects: ObjectStore, index: ServingIndex, model: str, settings: ServingSettings) -> None:
    """Keeps a model's settings in the store, then in the index.

    Raises:
        UnavailableError: the store cannot be reached.
    """
    await asyncio.to_thread(ServingStore(objects).put, model, settings)
    await index.put(model, settings)
