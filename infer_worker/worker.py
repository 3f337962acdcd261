"""An inference worker process: finds its engine, fetches and loads it, serves it, and leaves in order."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace

from enginemesh.v1 import workers_pb2
from infer_worker.backends import backend_class
from infer_worker.engine_choice import Device, wait_for_engine
from infer_worker.lease import WorkerLease
from infer_worker.serving import Serving
from mesh import metrics, semconv
from mesh.bus.connection import connect
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.engine_cache import EngineCache
from mesh.engine_store import EngineStore
from mesh.errors import ExhaustedError, MeshError, UnavailableError
from mesh.hardware import detect_target
from mesh.object_store import ObjectStore
from mesh.signing import Trust
from mesh.waiting import cancel_until_ended

if TYPE_CHECKING:
    from pathlib import Path

    from enginemesh.internal.v1 import engine_process_pb2
    from mesh.manifest import Manifest
    from mesh.settings import InferWorkerSettings

log = structlog.get_logger(__name__)
_tracer = trace.get_tracer("enginemesh.infer_worker")

_NS_PER_US = 1000
_US_PER_S = 1_000_000


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
        self._lease = WorkerLease(Leases(self._redis, WORKER), settings, self._device.target)
        self._cache = EngineCache(settings.data_dir / "engines", settings.cache_limit_bytes)

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
            self._cache.close()

    async def _work(self, stop: asyncio.Event) -> int:
        stopping = asyncio.ensure_future(stop.wait())
        starting = asyncio.ensure_future(self._start())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await cancel_until_ended(starting)
            return 0
        try:
            serving = starting.result()
        except MeshError as error:
            log.error(  # noqa: TRY400 - the message says all, a traceback no more
                "engine not started", error=error.message, metadata=error.metadata
            )
            return 1
        return await self._serve(serving, stopping)

    async def _serve(self, serving: Serving, stopping: asyncio.Future[Any]) -> int:
        running = asyncio.ensure_future(serving.run())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            why = await self._outcome(running)
        else:
            self._lease.changed(workers_pb2.WORKER_STATE_DRAINING)
            why = await self._drain(serving, running)
        await serving.close(why or "the worker is stopping")
        return 1 if why else 0

    async def _drain(self, serving: Serving, running: asyncio.Future[Any]) -> str:
        """Lets running sequences end; returns what went wrong meanwhile, empty if nothing did."""
        log.info("worker drains", running=serving.slots_used, limit_s=self._settings.drain_timeout_s)
        draining = asyncio.ensure_future(serving.drain())
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

    # -- from nothing to serving ----------------------------------------------------------------------

    async def _start(self) -> Serving:
        for kind in self._device.kinds:
            backend_class(kind)  # a mistake in the settings shows now, not when such an engine appears
        with _tracer.start_as_current_span("worker.cold_start") as span:
            span.set_attribute(semconv.REQUEST_MODEL, self._settings.model)
            span.set_attribute(semconv.WORKER, self._settings.worker_id)
            manifest = await self._match()
            span.set_attribute(semconv.ENGINE, manifest.digest)
            with _tracer.start_as_current_span("engine.fetch", attributes={semconv.BYTES: manifest.size}):
                folder = await self._fetch(manifest)
            return await self._load(manifest, folder)

    async def _match(self) -> Manifest:
        with _tracer.start_as_current_span("engine.match") as span:
            choice = await wait_for_engine(
                EngineIndex(self._redis), self._settings.model, self._device, self._waiting
            )
            assert choice.manifest is not None  # noqa: S101 - what it waited for
            span.set_attribute(semconv.ENGINE, choice.manifest.digest)
            if choice.refusals:
                span.set_attribute(semconv.MATCH_REASON, list(choice.refusals))
        log.info("engine chosen", engine=choice.manifest.digest, passed_over=list(choice.refusals))
        self._lease.info.engine = f"engines/{choice.manifest.digest}"
        return choice.manifest

    def _waiting(self, why: str) -> None:
        if self._lease.info.detail != why:
            log.info("waiting for an engine", why=why, target=self._device.target.key)
        self._lease.changed(workers_pb2.WORKER_STATE_WAITING_FOR_ENGINE, why)

    async def _fetch(self, manifest: Manifest) -> Path:
        self._lease.changed(workers_pb2.WORKER_STATE_FETCHING)
        began = time.monotonic()
        while True:
            try:
                folder = await self._fetch_once(manifest)
            except (UnavailableError, ExhaustedError) as error:
                log.warning("engine not fetched yet", error=error.message)
                self._lease.changed(workers_pb2.WORKER_STATE_FETCHING, error.message)
                await asyncio.sleep(error.retry_after_s)
                continue
            attributes = {semconv.REQUEST_MODEL: self._settings.model}
            metrics.ENGINE_FETCH_DURATION.record(time.monotonic() - began, attributes)
            return folder

    async def _fetch_once(self, manifest: Manifest) -> Path:
        """Fetches in a thread, which gives up at the next progress report once this task is cancelled."""
        is_given_up = threading.Event()

        def report(done: int, total: int) -> None:
            if is_given_up.is_set():
                raise UnavailableError("the worker is stopping", 1.0)
            self._lease.info.detail = f"{done >> 20} of {total >> 20} MiB"

        store = EngineStore(ObjectStore.from_settings(self._settings, create_bucket=False))
        try:
            return await asyncio.to_thread(self._cache.fetch, store, manifest, report)
        finally:
            is_given_up.set()

    async def _load(self, manifest: Manifest, folder: Path) -> Serving:
        self._device.require(manifest)
        self._lease.changed(workers_pb2.WORKER_STATE_LOADING)
        serving = Serving(self._settings, self._redis, manifest)
        began_ns = time.time_ns()
        ready = await serving.start(folder)
        _record_load(ready, began_ns, self._settings.model, manifest)
        self._lease.before_renewal = serving.describe
        self._lease.changed(workers_pb2.WORKER_STATE_READY)
        log.info(
            "worker ready",
            engine=manifest.digest,
            slots=ready.slots,
            load_s=ready.load_us / _US_PER_S,
            warm_up_s=ready.warm_up_us / _US_PER_S,
        )
        return serving


def _record_load(
    ready: engine_process_pb2.EngineReady, began_ns: int, model: str, manifest: Manifest
) -> None:
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
    metrics.ENGINE_LOAD_DURATION.record((now_ns - began_ns) / 1e9, {semconv.REQUEST_MODEL: model})
