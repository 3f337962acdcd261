"""A build worker: holds a lease, takes jobs for its own hardware, one at a time."""

from __future__ import annotations

import asyncio
import os
import platform
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from build_worker.backends import load_builder
from build_worker.leftovers import sweep_ended
from build_worker.pipeline import Pipeline
from build_worker.running_build import RunningBuild
from build_worker.work_folder import remove_abandoned
from enginemesh.v1 import workers_pb2
from mesh.build_logs import BuildLogs
from mesh.bus.build_claims import BuildClaims
from mesh.bus.build_jobs import KEEP_S, BuildConsumer
from mesh.bus.builds import BuildQueue
from mesh.bus.connection import UNREACHABLE, connect
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.engine_store import EngineStore
from mesh.errors import MeshError
from mesh.waiting import cancel_until_ended, wait_until_set

if TYPE_CHECKING:
    from mesh.bus.build_jobs import TakenBuild
    from mesh.settings import BuildWorkerSettings
    from mesh.target import Target

TAKE_TIMEOUT_S = 1.0
"""Longest wait for a job; also how late a request to stop is noticed by an idle worker."""

RETRY_DELAY_S = 1.0
SWEEP_INTERVAL_S = 600.0

log = structlog.get_logger(__name__)


class BuildWorker:
    """Everything that one build worker process is made of.

    Args:
        settings: Where Redis and the store are; kinds; folders.
        target: The hardware of this host.

    Raises:
        UnsupportedError: a kind in the settings has no builder.
        PreconditionError: the keys in the settings cannot be used.
    """

    def __init__(self, settings: BuildWorkerSettings, target: Target) -> None:
        for kind in settings.kind_list:
            load_builder(kind)
        self._settings = settings
        self._redis = connect(settings.redis_url)
        self._leases = Leases(self._redis, WORKER)
        self._consumer = BuildConsumer(
            self._redis, target.key, settings.kind_list, settings.worker_id, settings.lease_ttl_s
        )
        store = EngineStore.of_publisher(settings)
        self._queue = BuildQueue(self._redis)
        claims = BuildClaims(self._redis, settings.lease_ttl_s)
        self._pipeline = Pipeline(store, EngineIndex(self._redis), claims, target, settings)
        self._info = workers_pb2.Worker(
            name=f"workers/{settings.worker_id}",
            role=workers_pb2.WORKER_ROLE_BUILD,
            state=workers_pb2.WORKER_STATE_READY,
            kinds=settings.kind_list,
            target=target.to_proto(),
            slots=1,
            host=platform.node(),
            process_id=os.getpid(),
        )
        self._info.start_time.GetCurrentTime()
        self._has_changed = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set; then finishes its build within the grace time, or gives it back."""
        abandoned = await asyncio.to_thread(remove_abandoned, self._pipeline.root)
        target = self._info.target.key
        log.info("build worker ready", kinds=self._settings.kinds, target=target, removed=abandoned)
        lease = asyncio.ensure_future(self._renew_lease())
        sweep = asyncio.ensure_future(self._sweep())
        try:
            while not stop.is_set():
                taken = await self._take()
                if taken is not None:
                    await self._run_build(taken, stop)
        finally:
            await cancel_until_ended(lease, sweep)
            await self._close()

    async def _take(self) -> TakenBuild | None:
        try:
            return await self._consumer.take(TAKE_TIMEOUT_S)
        except UNREACHABLE as error:
            log.warning("no jobs: redis unreachable", error=str(error))
            await asyncio.sleep(RETRY_DELAY_S)
            return None

    async def _run_build(self, taken: TakenBuild, stop: asyncio.Event) -> None:
        log.info("build begins", build=taken.job.build_id, model=taken.job.spec.model)
        if taken.deliveries > 1:  # the worker that died over it may have been of this host
            await asyncio.to_thread(remove_abandoned, self._pipeline.root)
        self._say(slots_used=1)
        build = asyncio.ensure_future(
            RunningBuild(self._redis, self._consumer, self._pipeline, taken, self._settings).run()
        )
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({build, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not build.done():
                self._say(slots_used=1, state=workers_pb2.WORKER_STATE_DRAINING)
                await asyncio.wait({build}, timeout=self._settings.drain_timeout_s)
        finally:
            stopping.cancel()
            build.cancel()
            await asyncio.wait({build})
            self._say(slots_used=0, state=self._info.state)
        if build.cancelled():
            log.info("build given back", build=taken.job.build_id)
        elif build.exception() is not None:  # as when Redis went away at a bad moment: others will claim it
            log.error("build dropped", build=taken.job.build_id, exc_info=build.exception())
        else:
            log.info("build ended", build=taken.job.build_id)

    def _say(
        self, *, slots_used: int, state: workers_pb2.WorkerState.ValueType = workers_pb2.WORKER_STATE_READY
    ) -> None:
        self._info.slots_used = slots_used
        self._info.state = state
        self._has_changed.set()

    async def _renew_lease(self) -> None:
        """Renews the lease for ever, at once when the worker has something new to say."""
        while True:
            self._has_changed.clear()
            try:
                await self._leases.renew(
                    self._settings.worker_id, self._info.SerializeToString(), self._settings.lease_ttl_s
                )
            except UNREACHABLE as error:
                log.warning("lease not renewed", error=str(error))
            await wait_until_set(self._has_changed, self._settings.lease_ttl_s / 3)

    async def _sweep(self) -> None:
        """Removes from the store what no build needs any more, for ever."""
        store = self._pipeline.store
        while True:
            await sweep_ended(store, self._queue)
            try:
                await asyncio.to_thread(BuildLogs(store.objects).delete_older, timedelta(seconds=KEEP_S))
            except MeshError as error:
                log.warning("old logs not removed", error=error.message)
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _close(self) -> None:
        try:
            await self._leases.release(self._settings.worker_id)
            await self._consumer.close()
        except UNREACHABLE as error:
            log.warning("lease not released; it will run out", error=str(error))
        await self._redis.aclose()
        log.info("build worker stopped")
