"""An inference worker process: finds its engine, fetches and loads it, serves it, and leaves in order.

While it serves, it fetches what should be served next; then it lets what runs end, and changes engines.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace

from enginemesh.v1 import workers_pb2
from infer_worker.engine_choice import Device
from infer_worker.engine_fetch import EngineFetch
from infer_worker.lease import WorkerLease
from infer_worker.next_engine import NextEngine
from infer_worker.starting import LocalEngine, Starting
from infer_worker.turn import Turn
from mesh import semconv
from mesh.bus.connection import connect
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.bus.requests import RequestProducer
from mesh.errors import MeshError
from mesh.hardware import detect_target
from mesh.signing import Trust
from mesh.waiting import cancel_until_ended

if TYPE_CHECKING:
    from infer_worker.serving import Serving
    from infer_worker.starting import Served
    from mesh.settings import InferWorkerSettings

log = structlog.get_logger(__name__)
_tracer = trace.get_tracer("enginemesh.infer_worker")


class Worker:
    """One worker. `run` is its whole life."""

    def __init__(self, settings: InferWorkerSettings) -> None:
        self._settings = settings
        self._redis = connect(settings.redis_url)
        self._device = Device(
            detect_target(settings.kind_list),
            settings.kind_list,
            settings.match_policy,
            Trust.from_settings(settings),
        )
        leases = Leases(self._redis, WORKER)
        self._lease = WorkerLease(leases, settings, self._device.target)
        self._fetch = EngineFetch(settings)
        self._starting = Starting(settings, self._redis, self._device, self._fetch, self._lease)
        queues = RequestProducer(self._redis)
        self._next = NextEngine(
            EngineIndex(self._redis), queues, settings.model_list, self._device, settings.model_patience_s
        )
        self._turn = Turn(leases, queues, self._lease)

    async def run(self, stop: asyncio.Event) -> int:
        """Works until `stop` is set (0), or until the engine cannot be loaded or has died (1).

        Returns:
            The exit status of the process.
        """
        lease = asyncio.ensure_future(self._lease.keep())
        try:
            return await self._work(stop)
        finally:
            await cancel_until_ended(lease)
            await self._lease.release()
            await self._redis.aclose()
            self._fetch.close()

    async def _work(self, stop: asyncio.Event) -> int:
        stopping = asyncio.ensure_future(stop.wait())
        starting = asyncio.ensure_future(self._starting.cold_start())
        while True:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await cancel_until_ended(starting)
                return 0
            try:
                served = starting.result()
            except MeshError as error:
                log.error(  # noqa: TRY400 - the message says all, a traceback no more
                    "engine not started", error=error.message, metadata=error.metadata
                )
                return 1
            successor = await self._serve(served, stopping)
            if not isinstance(successor, LocalEngine):
                return successor
            starting = asyncio.ensure_future(self._change(served.engine, successor))

    async def _serve(self, served: Served, stopping: asyncio.Future[Any]) -> LocalEngine | int:
        """Serves an engine until the worker ends, or another should take its place and nothing runs.

        Returns:
            The exit status of the process, or the engine that comes next.
        """
        serving = served.serving
        running = asyncio.ensure_future(serving.run())
        preparing = asyncio.ensure_future(self._prepare(served))
        await asyncio.wait([running, preparing, stopping], return_when=asyncio.FIRST_COMPLETED)
        successor = preparing.result() if preparing.done() else None
        await cancel_until_ended(preparing)
        if running.done():
            why = await self._outcome(running)
        else:
            self._lease.changed(workers_pb2.WORKER_STATE_DRAINING)
            why = await self._drain(serving, running, stopping)
        await serving.close(why or "the worker is stopping")
        if why:
            return 1
        return 0 if stopping.done() or successor is None else successor

    async def _drain(
        self, serving: Serving, running: asyncio.Future[Any], stopping: asyncio.Future[Any]
    ) -> str:
        """Lets running sequences end; returns what went wrong meanwhile, empty if nothing did.

        They have `drain_timeout_s` when the worker stops, and all the time that they need before that.
        """
        log.info("worker drains", running=serving.slots_used)
        draining = asyncio.ensure_future(serving.drain())
        await asyncio.wait([running, draining, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await asyncio.wait(
                [running, draining],
                timeout=self._settings.drain_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        draining.cancel()
        if running.done():
            return await self._outcome(running)
        running.cancel()
        await asyncio.gather(running, draining, return_exceptions=True)
        return ""

    async def _outcome(self, running: asyncio.Future[Any]) -> str:
        """Why serving ended by itself."""
        try:
            why = f"the engine's process ended: {await running}"
        except Exception as error:  # whatever it is, gateways are told before the process ends
            log.exception("serving failed")
            return f"the worker failed: {error!r}"
        log.error("engine is dead", why=why)
        return why

    async def _prepare(self, served: Served) -> LocalEngine:
        """Returns once another engine should be served, is here, and it is this worker's turn to change."""
        present = served.engine.record
        while True:
            record = await self._next.wait(present, lambda: not served.serving.slots_used)
            log.info("next engine", engine=record.digest, model=record.manifest.model)
            attributes = {semconv.ENGINE: record.digest, semconv.WORKER: self._settings.worker_id}
            with _tracer.start_as_current_span("worker.prefetch", attributes=attributes):
                try:
                    self._device.require(record.manifest)
                    folder = await self._fetch.fetch(record.manifest, lambda _: None, gives_way=True)
                except MeshError as error:
                    log.warning("next engine given up", engine=record.digest, error=error.message)
                    self._device.given_up[record.digest] = f"was not fetched: {error.message}"
                    continue
            await self._turn.wait(present, record)
            return LocalEngine(record, folder)

    async def _change(self, before: LocalEngine, successor: LocalEngine) -> Served:
        attributes = {semconv.ENGINE: successor.record.digest, semconv.WORKER: self._settings.worker_id}
        with _tracer.start_as_current_span("worker.change_engine", attributes=attributes):
            return await self._starting.succeed(before, successor)
