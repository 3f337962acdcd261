"""From nothing, or from another engine, to an engine that serves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from opentelemetry import trace

from enginemesh.v1 import workers_pb2
from infer_worker.backends import backend_class
from infer_worker.engine_choice import wait_for_engine
from infer_worker.serving import Serving
from mesh import metrics, semconv
from mesh.bus.index import EngineIndex
from mesh.errors import MeshError

if TYPE_CHECKING:
    from pathlib import Path

    from redis.asyncio import Redis

    from enginemesh.internal.v1 import engine_process_pb2
    from infer_worker.engine_choice import Device
    from infer_worker.engine_fetch import EngineFetch
    from infer_worker.lease import WorkerLease
    from mesh.engine_store import EngineRecord
    from mesh.manifest import Manifest
    from mesh.settings import InferWorkerSettings

log = structlog.get_logger(__name__)
_tracer = trace.get_tracer("enginemesh.infer_worker")

_NS_PER_US = 1000
_US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine on this host's disk."""

    record: EngineRecord
    folder: Path

    @property
    def manifest(self) -> Manifest:
        """What it is."""
        return self.record.manifest


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and what serves it."""

    engine: LocalEngine
    serving: Serving


class Starting:
    """Starts engines, and lets the mesh know by the lease how far that is."""

    def __init__(
        self,
        settings: InferWorkerSettings,
        redis: Redis,
        device: Device,
        fetch: EngineFetch,
        lease: WorkerLease,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._device = device
        self._fetch = fetch
        self._lease = lease

    async def cold_start(self) -> Served:
        """Waits for an engine that fits, fetches it and loads it.

        Raises:
            MeshError: it cannot be had, or does not load.
        """
        for kind in self._device.kinds:
            backend_class(kind)  # a mistake in the settings shows now, not when such an engine appears
        with _tracer.start_as_current_span("worker.cold_start") as span:
            span.set_attribute(semconv.WORKER, self._settings.worker_id)
            record = await self._match()
            manifest = record.manifest
            span.set_attributes({semconv.REQUEST_MODEL: manifest.model, semconv.ENGINE: manifest.digest})
            self._lease.changed(workers_pb2.WORKER_STATE_FETCHING)
            with _tracer.start_as_current_span("engine.fetch", attributes={semconv.BYTES: manifest.size}):
                folder = await self._fetch.fetch(manifest, self._tell)
            return await self._load(LocalEngine(record, folder))

    async def succeed(self, before: LocalEngine, successor: LocalEngine) -> Served:
        """Loads an engine in place of one that no longer runs, or that one again if this fails.

        Raises:
            MeshError: neither loads.
        """
        try:
            served = await self._load(successor)
        except MeshError as error:
            log.error(  # noqa: TRY400 - the message says all, a traceback no more
                "next engine does not load; back to the one before",
                engine=successor.record.digest,
                error=error.message,
            )
            self._device.given_up[successor.record.digest] = f"did not load here: {error.message}"
            self._fetch.release(successor.manifest)
            return await self._load(before)
        self._fetch.release(before.manifest)
        return served

    async def _match(self) -> EngineRecord:
        with _tracer.start_as_current_span("engine.match") as span:
            choice = await wait_for_engine(
                EngineIndex(self._redis), self._settings.model_list, self._device, self._waiting
            )
            assert choice.record is not None  # noqa: S101 - what it waited for
            span.set_attribute(semconv.ENGINE, choice.record.digest)
            if choice.refusals:
                span.set_attribute(semconv.MATCH_REASON, list(choice.refusals))
        log.info("engine chosen", engine=choice.record.digest, passed_over=list(choice.refusals))
        self._lease.serves(choice.record.manifest)
        return choice.record

    def _waiting(self, why: str) -> None:
        if self._lease.info.detail != why:
            log.info("waiting for an engine", why=why, target=self._device.target.key)
        self._lease.changed(workers_pb2.WORKER_STATE_WAITING_FOR_ENGINE, why)

    def _tell(self, progress: str) -> None:
        self._lease.info.detail = progress

    async def _load(self, engine: LocalEngine) -> Served:
        manifest = engine.manifest
        self._device.require(manifest)
        self._lease.serves(manifest)
        self._lease.changed(workers_pb2.WORKER_STATE_LOADING)
        serving = Serving(self._settings, self._redis, manifest)
        began_ns = time.time_ns()
        ready = await serving.start(engine.folder)
        _record_load(ready, began_ns, manifest)
        self._lease.before_renewal = serving.describe
        self._lease.info.next_engine = ""
        self._lease.changed(workers_pb2.WORKER_STATE_READY)
        log.info(
            "worker ready",
            engine=manifest.digest,
            slots=ready.slots,
            load_s=ready.load_us / _US_PER_S,
            warm_up_s=ready.warm_up_us / _US_PER_S,
        )
        return Served(engine, serving)


def _record_load(ready: engine_process_pb2.EngineReady, began_ns: int, manifest: Manifest) -> None:
    """Spans of what the engine's process did, by the times that it tells."""
    now_ns = time.time_ns()
    warm_ns = now_ns - ready.warm_up_us * _NS_PER_US
    attributes = {semconv.ENGINE: manifest.digest, semconv.ENGINE_KIND: manifest.kind}
    for name, start_ns, end_ns in (
        ("engine.load", began_ns, warm_ns),
        ("engine.warm_up", warm_ns, now_ns),
    ):
        span = _tracer.start_span(name, start_time=start_ns, attributes=attributes)
        span.end(end_ns)
    metrics.ENGINE_LOAD_DURATION.record((now_ns - began_ns) / 1e9, {semconv.REQUEST_MODEL: manifest.model})
