"""The index of engines. The store is the truth; this copy of it answers quickly and tells of changes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import structlog

from mesh.bus import keys
from mesh.bus.connection import BLOCK_LIMIT_S
from mesh.bus.serving import EVENTS_KEPT, ServingIndex
from mesh.engine_store import EngineRecord
from mesh.errors import IntegrityError
from mesh.manifest import Manifest, canonical_json
from mesh.signing import Signature

if TYPE_CHECKING:
    from collections.abc import Iterable

    from redis.asyncio import Redis

    from mesh.engine_store import EngineStore

NO_EVENT = "0-0"

_log = structlog.get_logger()


class EngineIndex:
    """Every engine of the store, as Redis knows it."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.serving = ServingIndex(redis)

    async def add(self, record: EngineRecord) -> None:
        """Takes an engine in, or replaces its record."""
        await self._add_all([record])
        await self._announce()

    async def remove(self, record: EngineRecord) -> None:
        """Takes an engine out; harmless if it is not there."""
        await self._remove_all([record])
        await self._announce()

    async def rebuild(
        self,
        records: Iterable[EngineRecord],
        forget: Iterable[EngineRecord] = (),
        *,
        is_whole: bool = False,
    ) -> None:
        """Takes many engines in and others out, with one event.

        Args:
            records: Engines to take in.
            forget: Engines to take out.
            is_whole: Whether the index then has every engine of the store.
        """
        await self._add_all(records)
        await self._remove_all(forget)
        if is_whole:
            await self._redis.set(keys.INDEX_WHOLE, 1)
        await self._announce()

    async def is_whole(self) -> bool:
        """Whether it has every engine of the store; not so once Redis has lost its data."""
        return bool(await self._redis.exists(keys.INDEX_WHOLE))

    async def engines(self, model: str | None = None) -> list[EngineRecord]:
        """All engines, or those of one model, newest first."""
        models = await self.models() if model is None else [model]
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in models:
                pipe.hgetall(keys.model_engines(name))
            hashes = await pipe.execute()
        decoded = (_decode(digest.decode(), value) for entries in hashes for digest, value in entries.items())
        records = [record for record in decoded if record]
        return sorted(records, key=lambda record: (record.create_time, record.digest), reverse=True)

    async def models(self) -> list[str]:
        """Every model that has an engine, by name."""
        members: Any = await self._redis.smembers(keys.MODELS)
        return sorted(member.decode() for member in members)

    async def latest_event_id(self) -> str:
        """The id of the last change; NO_EVENT if there was none."""
        latest: Any = await self._redis.xrevrange(keys.INDEX_EVENTS, count=1)
        return latest[0][0].decode() if latest else NO_EVENT

    async def wait_for_change(self, since: str, timeout_s: float) -> str | None:
        """Waits for a change after the event `since`.

        That the events were lost with Redis's data is a change too.

        Args:
            since: Id from latest_event_id or from an earlier call.
            timeout_s: How long to wait, BLOCK_LIMIT_S at most.

        Returns:
            The id of the last change; None if there was none.
        """
        block_ms = max(1, round(min(timeout_s, BLOCK_LIMIT_S) * 1000))
        read: Any = await self._redis.xread({keys.INDEX_EVENTS: since}, block=block_ms)
        if read:
            return str(read[0][1][-1][0].decode())
        latest = await self.latest_event_id()
        return latest if latest != since else None

    async def _add_all(self, records: Iterable[EngineRecord]) -> None:
        # Two hash tags, so no transaction: whoever sees the model before its engine finds it empty.
        async with self._redis.pipeline(transaction=False) as pipe:
            for record in records:
                pipe.hset(keys.model_engines(record.manifest.model), record.digest, _encode(record))
                pipe.sadd(keys.MODELS, record.manifest.model)
            await pipe.execute()

    async def _remove_all(self, records: Iterable[EngineRecord]) -> None:
        for record in records:
            model = record.manifest.model
            await self._redis.hdel(keys.model_engines(model), record.digest)
            if await self._redis.exists(keys.model_engines(model)):
                continue
            await self._redis.srem(keys.MODELS, model)
            if await self._redis.exists(keys.model_engines(model)):  # added meanwhile by another process
                await self._redis.sadd(keys.MODELS, model)

    async def _announce(self) -> None:
        await self._redis.xadd(keys.INDEX_EVENTS, {"changed": 1}, maxlen=EVENTS_KEPT)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What rebuild_index found: engines in the store, and which the index had not or no longer should."""

    engines: int
    added: tuple[EngineRecord, ...]
    forgotten: tuple[EngineRecord, ...]


async def rebuild_index(store: EngineStore, index: EngineIndex) -> Rebuilt:
    """Makes the index agree with the store.

    Engines that others publish meanwhile are kept: only what was in the index before the store was read
    can be forgotten.
    """
    known = {record.digest: record for record in await index.engines()}
    records = await asyncio.to_thread(store.engines)
    stored = {record.digest for record in records}
    forgotten = tuple(record for digest, record in known.items() if digest not in stored)
    await index.serving.rebuild(store.objects)
    await index.rebuild(records, forget=forgotten, is_whole=True)
    return Rebuilt(len(records), tuple(r for r in records if r.digest not in known), forgotten)


def _encode(record: EngineRecord) -> bytes:
    return canonical_json(
        {
            "create_time_ms": round(record.create_time.timestamp() * 1000),
            "manifest": json.loads(record.manifest.to_bytes()),
            "signatures": [signature.model_dump(mode="json") for signature in record.signatures],
        }
    )


def _decode(digest: str, value: bytes) -> EngineRecord | None:
    fields = json.loads(value)
    create_time = datetime.fromtimestamp(fields["create_time_ms"] / 1000, tz=timezone.utc)
    try:
        manifest = Manifest.from_bytes(canonical_json(fields["manifest"]), digest)
        signatures = [Signature.from_bytes(canonical_json(each)) for each in fields.get("signatures", ())]
    except IntegrityError as error:  # as of another version of the mesh; one entry must not hide all
        _log.warning("engine left out", engine=digest, reason=error.message)
        return None
    return EngineRecord(manifest, create_time, tuple(signatures))
