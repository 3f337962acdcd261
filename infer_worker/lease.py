"""Tells the mesh that this worker exists, and what it is doing."""

from __future__ import annotations

import asyncio
import os
import platform
from typing import TYPE_CHECKING

import structlog

from enginemesh.v1 import workers_pb2
from mesh.bus.connection import UNREACHABLE
from mesh.waiting import wait_until_set

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.bus.leases import Leases
    from mesh.manifest import Manifest
    from mesh.settings import InferWorkerSettings
    from mesh.target import Target

log = structlog.get_logger(__name__)


class WorkerLease:
    """The lease of this process. `info` is what it says; `changed` says it at once."""

    def __init__(self, leases: Leases, settings: InferWorkerSettings, target: Target) -> None:
        self._leases = leases
        self._worker_id = settings.worker_id
        self._ttl_s = settings.lease_ttl_s
        self._has_changed = asyncio.Event()
        self.before_renewal: Callable[[workers_pb2.Worker], None] | None = None
        """Fills in what changes all the time."""
        self.info = workers_pb2.Worker(
            name=f"workers/{settings.worker_id}",
            role=workers_pb2.WORKER_ROLE_INFERENCE,
            state=workers_pb2.WORKER_STATE_WAITING_FOR_ENGINE,
            model=f"models/{settings.model_list[0]}",
            kinds=settings.kind_list,
            target=target.to_proto(),
            host=platform.node(),
            process_id=os.getpid(),
        )
        self.info.start_time.GetCurrentTime()

    def changed(self, state: workers_pb2.WorkerState.ValueType, detail: str = "") -> None:
        """Enters a state, and has it told at once."""
        self.info.state = state
        self.info.detail = detail
        self._has_changed.set()

    def serves(self, manifest: Manifest) -> None:
        """Names another engine and its model; the next renewal tells."""
        self.before_renewal = None  # what it described is over
        self.info.model = f"models/{manifest.model}"
        self.info.engine = f"engines/{manifest.digest}"
        self.info.slots = self.info.slots_used = 0
        self.info.ClearField("kv_cache_usage")

    async def keep(self) -> None:
        """Renews the lease, for ever; while Redis is unreachable it goes on trying."""
        is_unreachable = False
        while True:
            self._has_changed.clear()
            if self.before_renewal is not None:
                self.before_renewal(self.info)
            try:
                await self._leases.renew(self._worker_id, self.info.SerializeToString(), self._ttl_s)
            except UNREACHABLE as error:
                if not is_unreachable:
                    log.warning("lease not renewed", error=str(error))
                is_unreachable = True
            else:
                is_unreachable = False
            await wait_until_set(self._has_changed, self._ttl_s / 3)

    async def release(self) -> None:
        """Ends the lease; if Redis cannot be reached it runs out by itself."""
        try:
            await self._leases.release(self._worker_id)
        except UNREACHABLE as error:
            log.warning("lease not released; it will run out", error=str(error))
