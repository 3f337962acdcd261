"""Serves one engine: requests in from the queue, tokens out over the links."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import structlog

from enginemesh.internal.v1 import engine_process_pb2, link_pb2, queue_pb2, step_pb2
from infer_worker.engine_process import EngineProcess
from infer_worker.intake import Intake
from infer_worker.links import LinkSet
from infer_worker.request_spans import RequestSpans
from infer_worker.sequences import SequenceTable
from mesh import metrics, semconv
from mesh.bus.leases import GATEWAY, WORKER, Leases
from mesh.bus.requests import RequestConsumer
from mesh.waiting import cancel_until_ended

if TYPE_CHECKING:
    from pathlib import Path

    from redis.asyncio import Redis

    from enginemesh.v1 import workers_pb2
    from infer_worker.link import Link
    from mesh.bus.requests import Entry
    from mesh.manifest import Manifest
    from mesh.settings import InferWorkerSettings

log = structlog.get_logger(__name__)

STALL_CHECK_S = 1.0


class Serving:
    """`start`, then `run` until it returns or is cancelled, perhaps `drain`; `close` at the end."""

    def __init__(self, settings: InferWorkerSettings, redis: Redis, manifest: Manifest) -> None:
        self._settings = settings
        self._manifest = manifest
        self._loop = asyncio.get_running_loop()
        self._gateways = Leases(redis, GATEWAY)
        self._workers = Leases(redis, WORKER)
        self._attributes = {semconv.REQUEST_MODEL: manifest.model, semconv.WORKER: settings.worker_id}
        self.engine = EngineProcess(self._take_step, self._take_stats)
        self.slots = 0
        self._kv_cache_usage: float | None = None
        self._busy_since = 0.0
        self._table = SequenceTable(manifest.model)
        hello = link_pb2.Hello(worker_id=settings.worker_id, engine=manifest.digest)
        self._links = LinkSet(hello, self._take_message, self._lose_link)
        consumer = RequestConsumer(
            redis, manifest.model, manifest.digest, settings.worker_id, settings.claim_idle_s
        )
        self._intake = Intake(
            consumer,
            self._gateways,
            self._links,
            free_slots=lambda claimed: self.slots - self._table.count(claimed),
            begin=self._begin,
            stop=self._stop,
            bite=settings.take_bite,
            claim_interval_s=settings.claim_idle_s,
        )

    @property
    def slots_used(self) -> int:
        """Sequences that run now."""
        return len(self._table)

    async def start(self, folder: Path) -> engine_process_pb2.EngineReady:
        """Loads the engine.

        Raises:
            PreconditionError: it did not load.
        """
        ready = await self.engine.start(folder, self._manifest)
        self.slots = ready.slots
        metrics.SLOTS.set(ready.slots, self._attributes)
        metrics.SLOTS_USED.set(0, self._attributes)
        return ready

    async def run(self) -> str:
        """Serves until the engine dies, and says how it died."""
        died = asyncio.ensure_future(self.engine.died())
        self._taking = asyncio.ensure_future(self._intake.run())
        tasks: set[asyncio.Future[Any]] = {died, self._taking}
        for work in (
            self._intake.acknowledge(),
            self._intake.watch(),
            self._links.watch(self._gateways, self._holds_lease, self._settings.lease_ttl_s / 2),
            self._watch_engine(),
        ):
            tasks.add(asyncio.ensure_future(work))
        pending = tasks
        try:
            while not died.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.cancelled():  # as taking is when it drains
                        task.result()
            return died.result()
        finally:
            await cancel_until_ended(*tasks)

    async def drain(self) -> None:
        """Takes nothing more, and waits until what runs has ended. Claims without an answer count."""
        await cancel_until_ended(self._taking)
        while self._table or self._intake:
            await self._intake.wait_for_freed_slot()

    async def close(self, why: str) -> None:
        """Lets every gateway know of what has not ended, so that it goes on elsewhere, and stops the engine.

        Args:
            why: Told as the error of what has not ended.
        """
        unfinished = self._table.fail_all(why)
        if unfinished:
            log.warning("sequences are left to other workers", sequences=len(unfinished), why=why)
        await self._links.close()
        await self._intake.close()
        await self.engine.stop()

    def describe(self, info: workers_pb2.Worker) -> None:
        """Fills in how busy it is."""
        info.slots, info.slots_used = self.slots, len(self._table)
        if self._kv_cache_usage is not None:
            info.kv_cache_usage = self._kv_cache_usage

    # -- what the engine says -------------------------------------------------------------------------

    def _take_step(self, step: step_pb2.StepOutput) -> None:
        self._table.take_step(step)
        if step.finishes:
            self._intake.slot_freed()

    def _take_stats(self, stats: engine_process_pb2.EngineStats) -> None:
        metrics.SLOTS_USED.set(len(self._table), self._attributes)
        if stats.HasField("kv_cache_usage"):
            self._kv_cache_usage = stats.kv_cache_usage
            metrics.KV_CACHE_USAGE.set(stats.kv_cache_usage, self._attributes)
        for field, value in stats.ListFields():
            if field.name in metrics.ENGINE_GAUGES:
                metrics.ENGINE_GAUGES[field.name].set(value, self._attributes)
        for microseconds in stats.first_token_us:
            metrics.ENGINE_FIRST_TOKEN.record(microseconds / 1e6, self._attributes)

    async def _watch_engine(self) -> None:
        """Kills an engine that has work and says nothing: its gateways would wait for ever."""
        limit_s = self._settings.engine_stall_limit_s
        while True:
            before = self._loop.time()
            await asyncio.sleep(STALL_CHECK_S)
            now = self._loop.time()
            was_held_up = now - before > 2 * STALL_CHECK_S  # what the engine said may be unread
            heard = max(self.engine.last_heard, self._busy_since)
            if self._table and not was_held_up and now - heard > limit_s:
                log.error("engine is silent and is killed", silent_s=round(now - heard, 1))
                self.engine.kill()

    async def _holds_lease(self) -> bool:
        return await self._workers.is_live(self._settings.worker_id)

    # -- what was taken from the queue -----------------------------------------------------------------

    def _begin(self, link: Link, entry: Entry, request: queue_pb2.QueuedRequest) -> int:
        if not self._table:
            self._busy_since = self._loop.time()
        spans = None
        if request.traceparent:
            spans = RequestSpans(
                request,
                taken_us=time.time_ns() // 1000,
                stream=entry.stream,
                model=self._manifest.model,
                worker_id=self._settings.worker_id,
            )
        with_logprobs = request.sampling.HasField("logprobs")
        sequence = self._table.start(link.outbox, spans, with_logprobs=with_logprobs)
        self.engine.add(add_command(sequence.id, request))
        return sequence.id

    def _stop(self, link: Link, handle: int) -> None:
        if self._table.forget(link.outbox, handle) is not None:
            self.engine.cancel(handle)

    # -- what gateways say ----------------------------------------------------------------------------

    def _take_message(self, link: Link, message: link_pb2.GatewayMessage) -> None:
        for handle in message.grants:
            if not self._intake.granted(handle):
                link.outbox.fail(handle, "the worker no longer waited for this answer to its claim")
        for handle in message.refusals:
            self._intake.refused(handle)
        for handle in message.cancels:
            if self._table.cancel(link.outbox, handle):
                self.engine.cancel(handle)
        for resend in message.resends:
            self._table.send_again(link.outbox, resend.handle, resend.offset)
        if message.grants or message.cancels:
            self._intake.slot_freed()

    def _lose_link(self, link: Link) -> None:
        """Without its link a gateway has moved what ran over it, so it need not run here."""
        for sequence_id in self._table.cancel_all(link.outbox):
            self.engine.cancel(sequence_id)
        self._intake.link_lost(link)


def add_command(sequence_id: int, request: queue_pb2.QueuedRequest) -> engine_process_pb2.AddSequence:
    """A queued request as the engine takes it: what earlier attempts generated is part of the prompt."""
    command = engine_process_pb2.AddSequence(
        id=sequence_id, prompt_ids=request.prompt_ids, resumed=len(request.generated_ids)
    )
    command.prompt_ids.extend(request.generated_ids)
    command.sampling.CopyFrom(request.sampling)
    if request.sampling.HasField("max_tokens"):
        command.sampling.max_tokens = max(0, request.sampling.max_tokens - len(request.generated_ids))
    return command
