"""Which engines are kept, and what in the store belongs to none: garbage collection.

A run removes surplus engines (mesh/engine_removal.py leaves those in use alone), then blobs that no manifest
names and nobody publishes (mesh/sweeps.py), then markers and signatures of engines that are gone. Nothing
younger than the minimum age is touched.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from mesh import sweeps
from mesh.engine_removal import Removal
from mesh.errors import NotFoundError
from mesh.store_layout import (
    BLOBS,
    BUILDS,
    MANIFEST_SUFFIX,
    MANIFESTS,
    MODELS,
    PUBLISHING,
    SIGNATURES,
    SWEEPS,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mesh.engine_removal import EngineRemover
    from mesh.engine_store import EngineRecord
    from mesh.object_store import ObjectInfo

PARALLEL_READS = 8
DIGEST_BYTES = 64
STALE_SWEEP = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept.

    Attributes:
        newest: Engines of each model, kind and target, the newest; older ones are surplus.
        min_age: Nothing younger is removed.
    """

    newest: int = 3
    min_age: timedelta = timedelta(days=1)


@dataclass
class Garbage:
    """What is to go, or went.

    Attributes:
        engines: Surplus engines: those that go, and those that stay because they are in use.
        blobs: Bytes of each blob, by its sha256.
        leftovers: Keys of objects that belong to nothing.
    """

    engines: Removal = field(default_factory=Removal)
    blobs: dict[str, int] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)


def surplus(records: Iterable[EngineRecord], retention: Retention, now: datetime) -> list[EngineRecord]:
    """The engines that retention does not keep, oldest last."""
    seen: dict[tuple[str, str, str], int] = {}
    found = []
    for record in sorted(records, key=lambda each: (each.create_time, each.digest), reverse=True):
        group = (record.manifest.model, record.manifest.kind, record.manifest.target.key)
        seen[group] = seen.get(group, 0) + 1
        if seen[group] > retention.newest and now - record.create_time >= retention.min_age:
            found.append(record)
    return found


class GarbageCollector:
    """One run. Several may run at once, also on several hosts."""

    def __init__(self, remover: EngineRemover, retention: Retention) -> None:
        self._remover = remover
        self._store = remover.store
        self._objects = remover.store.objects
        self._retention = retention
        self._references = sweeps.References(self._objects)

    async def find(self) -> Garbage:
        """What `collect` would remove now.

        Raises:
            PreconditionError: a manifest is damaged (MANIFEST_DAMAGED).
        """
        uses = await self._remover.uses()
        engines = Removal()
        for record in await self._surplus():
            if why := uses.of(record):
                engines.kept.append((record, why))
            else:
                engines.removed.append(record)
        gone = {record.digest for record in engines.removed}
        blobs = await asyncio.to_thread(self._free_blobs, gone)
        return Garbage(engines, blobs, await asyncio.to_thread(self._leftovers))

    async def collect(self) -> Garbage:
        """Removes it; returns what went. Raises as `find` does, before anything was removed."""
        await asyncio.to_thread(self._references.read)
        engines = await self._remover.remove(await self._surplus())
        free = await asyncio.to_thread(self._free_blobs)
        swept = await asyncio.to_thread(sweeps.sweep, self._objects, self._references, free)
        leftovers = await asyncio.to_thread(self._leftovers)
        for key in leftovers:
            await asyncio.to_thread(self._objects.delete, key)
        begun_before = datetime.now(timezone.utc) - max(self._retention.min_age, timedelta(hours=1))
        await asyncio.to_thread(self._objects.abort_uploads, BLOBS, begun_before)
        return Garbage(engines, {sha256: free[sha256] for sha256 in swept}, leftovers)

    async def _surplus(self) -> list[EngineRecord]:
        records = await asyncio.to_thread(self._store.engines)
        return surplus(records, self._retention, datetime.now(timezone.utc))

    def _free_blobs(self, without: Collection[str] = ()) -> dict[str, int]:
        """Blobs old enough that nobody needs, with their sizes; `without` names engines that do not count."""
        old = {_name(entry): entry.size for entry in self._objects.list(BLOBS) if self._is_old(entry)}
        needed = self._references.read(without)
        return {sha256: size for sha256, size in old.items() if sha256 not in needed}

    def _leftovers(self) -> list[str]:
        """What belongs to engines that are gone, and announcements of processes that died long ago."""
        objects = self._objects
        belongings = [(entry, _owner(entry)) for entry in objects.list(SIGNATURES)]
        belongings += [(entry, _name(entry)) for entry in objects.list(MODELS)]
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            markers = list(objects.list(BUILDS))
            belongings += zip(markers, pool.map(self._marked_engine, markers), strict=True)
        # Listed later than what belongs to them, so that whoever publishes meanwhile is seen.
        announcements = list(objects.list(PUBLISHING))
        owners = {_owner(entry) for entry in announcements}
        owners |= {_name(entry).removesuffix(MANIFEST_SUFFIX) for entry in objects.list(MANIFESTS)}
        leftovers = [entry for entry, owner in belongings if owner not in owners and self._is_old(entry)]
        leftovers += [entry for entry in announcements if _is_older(entry, sweeps.ANNOUNCEMENT_LIFETIME)]
        leftovers += [entry for entry in objects.list(SWEEPS) if _is_older(entry, STALE_SWEEP)]
        return [entry.key for entry in leftovers]

    def _marked_engine(self, marker: ObjectInfo) -> str:
        try:
            return self._objects.get_bytes(marker.key, DIGEST_BYTES).decode("ascii", "replace")
        except NotFoundError:
            return ""

    def _is_old(self, entry: ObjectInfo) -> bool:
        return _is_older(entry, self._retention.min_age)


def _is_older(entry: ObjectInfo, age: timedelta) -> bool:
    return datetime.now(timezone.utc) - entry.last_modified >= age


def _name(entry: ObjectInfo) -> str:
    return entry.key.rpartition("/")[2]


def _owner(entry: ObjectInfo) -> str:
    """The engine in a key such as signatures/<engine>/<key id>.json."""
    return entry.key.split("/")[1]
