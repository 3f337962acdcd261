"""Workers of a model take a new engine one after the other, so that the others serve meanwhile.

Their leases say who waits (ready, with a next engine) and who changes (no longer ready). There is no lock: a
worker that dies loses its lease, and the next one goes on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from enginemesh.v1 import workers_pb2
from mesh.bus.connection import UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infer_worker.lease import WorkerLease
    from mesh.bus.leases import Leases
    from mesh.bus.requests import RequestProducer
    from mesh.engine_store import EngineRecord

LOOK_INTERVAL_S = 0.5


class Turn:
    """Waits until this worker may change engines."""

    def __init__(self, leases: Leases, queues: RequestProducer, lease: WorkerLease) -> None:
        self._leases = leases
        self._queues = queues
        self._lease = lease

    async def wait(self, present: EngineRecord, successor: EngineRecord) -> None:
        """Returns once no other worker of the model changes, and none that waits comes first.

        Requests that only the present engine may run are waited for as well. Between models there are no
        turns: who changes there has nothing to do, or was patient long enough.
        """
        if present.manifest.model != successor.manifest.model:
            return
        self._lease.info.next_engine = f"engines/{successor.digest}"
        self._lease.changed(workers_pb2.WORKER_STATE_READY)
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)  # others see this worker's lease by then
            try:
                live = await self._leases.live()
                others = [workers_pb2.Worker.FromString(info) for info in live.values()]
                if is_next(self._lease.info, others) and not await self._has_pinned(present):
                    return
            except UNREACHABLE:
                continue

    async def _has_pinned(self, present: EngineRecord) -> bool:
        """Whether requests wait for the present engine and no other."""
        model = present.manifest.model
        return await self._queues.depth(model, [present.digest]) > await self._queues.depth(model)


def is_next(worker: workers_pb2.Worker, others: Iterable[workers_pb2.Worker]) -> bool:
    """Whether it is a worker's turn among those of its model; it may be one of `others` itself."""
    for other in others:
        if other.name == worker.name or other.model != worker.model or not other.next_engine:
            continue
        if other.state != workers_pb2.WORKER_STATE_READY or other.name < worker.name:
            return False
    return True
