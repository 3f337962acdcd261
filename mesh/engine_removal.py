"""Removes engines that nobody uses, and finds out who uses which.

An engine is taken out of sight first (index, build marker), so that nobody chooses it any more. Then this
waits until every process that chose it before has said so, and looks once more. Only then it goes for good.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mesh.build_operation import metadata_of
from mesh.bus.builds import BuildQueue
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.errors import IntegrityError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from mesh.engine_store import EngineRecord, EngineStore

_DIGEST = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class Uses:
    """Who uses engines at this moment.

    Attributes:
        workers: By engine, a worker that runs, fetches or keeps it.
        builds: By model, a build that has not ended; it may be about to answer with any engine of the model.
    """

    workers: dict[str, str]
    builds: dict[str, str]

    def of(self, record: EngineRecord) -> str:
        """Why an engine must stay; empty if nobody uses it."""
        if record.digest in self.workers:
            return f"worker {self.workers[record.digest]} uses it"
        model = record.manifest.model
        return f"build {self.builds[model]} of model {model} runs" if model in self.builds else ""


@dataclass
class Removal:
    """What became of engines that were to be removed: those that are gone, and why others were kept."""

    removed: list[EngineRecord] = field(default_factory=list)
    kept: list[tuple[EngineRecord, str]] = field(default_factory=list)


class EngineRemover:
    """Removes engines.

    Args:
        store: Where they are.
        redis: Index, leases and builds.
        settle_s: How long a process may take from choosing an engine to saying so. A lease's lifetime
            suffices even after Redis lost its data.
    """

    def __init__(self, store: EngineStore, redis: Redis, settle_s: float) -> None:
        self.store = store
        self._index = EngineIndex(redis)
        self._leases = Leases(redis, WORKER)
        self._builds = BuildQueue(redis)
        self._settle_s = settle_s

    async def uses(self) -> Uses:
        """Who uses which engine now."""
        workers = {
            digest.decode(): worker_id
            for worker_id, info in (await self._leases.live()).items()
            for digest in _DIGEST.findall(info)  # whatever looks like one: of any field, of any version
        }
        states = await self._builds.states(await self._builds.ids())
        running = [operation for operation in states if not operation.done]
        builds = {metadata_of(each).spec.model: each.name.rpartition("/")[2] for each in running}
        return Uses(workers, builds)

    async def remove(self, records: Sequence[EngineRecord]) -> Removal:
        """Removes engines, but not those in use, and not their blobs; returns what became of each."""
        uses = await self.uses()
        result = Removal(kept=[(record, why) for record in records if (why := uses.of(record))])
        hidden = [record for record in records if not uses.of(record)]
        if not hidden:
            return result
        for record in hidden:
            await asyncio.to_thread(self.store.hide, record.manifest)
        await self._index.rebuild([], forget=hidden)
        await asyncio.sleep(self._settle_s)

        found_again = {record.digest for record in await self._index.engines()}
        uses = await self.uses()
        for record in hidden:
            why = "it has just been found again" if record.digest in found_again else uses.of(record)
            if why:
                await asyncio.to_thread(self.store.show, record.manifest)
                result.kept.append((record, why))
            else:
                await asyncio.to_thread(self.store.remove, record.digest)
                result.removed.append(record)
        await self._index.rebuild([record for record, _ in result.kept if record in hidden])
        return result

    async def remove_one(self, digest: str) -> None:
        """Removes one engine, also one whose manifest is damaged or was lost.

        Raises:
            NotFoundError: neither store nor index has it.
            PreconditionError: it is in use (ENGINE_IN_USE).
        """
        record = next((each for each in await self._index.engines() if each.digest == digest), None)
        if record is None:
            try:
                record = await asyncio.to_thread(self.store.record, digest)
            except IntegrityError:  # so nobody can run it, and nobody knows its model
                await asyncio.to_thread(self.store.remove, digest)
                return
        for _, why in (await self.remove([record])).kept:
            raise PreconditionError("ENGINE_IN_USE", f"engines/{digest}", f"engine {digest} is in use: {why}")
