"""One job in a worker's hands: runs it, holds it, says how far it is and how it ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
from opentelemetry import trace

from build_worker.attempts import SPAN_NAME, Attempts
from build_worker.leftovers import remove_leftovers
from build_worker.log_keeper import LogKeeper
from build_worker.pipeline import BuildRun
from build_worker.stage_spans import StageSpans, tracer
from build_worker.stages import Stage, percent_done
from enginemesh.v1 import builds_pb2
from mesh import build_operation, semconv, telemetry
from mesh.bus import keys
from mesh.bus.build_jobs import Hold
from mesh.bus.builds import BuildQueue
from mesh.bus.connection import UNREACHABLE
from mesh.errors import BuildCancelledError, BuildError, MeshError, NotFoundError
from mesh.model_file import ModelFile
from mesh.waiting import cancel_until_ended, wait_until_set

if TYPE_CHECKING:
    from google.longrunning import operations_pb2
    from redis.asyncio import Redis

    from build_worker.child_messages import Progress
    from build_worker.pipeline import Pipeline
    from mesh.bus.build_jobs import BuildConsumer, TakenBuild
    from mesh.settings import BuildWorkerSettings

HOLD_INTERVAL_S = 1.0
"""A hold is renewed at least this often; also how soon a cancellation is noticed."""

PROGRESS_INTERVAL_S = 0.2
log = structlog.get_logger(__name__)


class RunningBuild:
    """A build that this worker took.

    Args:
        redis: Connection.
        consumer: Holds the job.
        pipeline: Does the work.
        taken: The job.
        settings: Name of this worker, and how soon it is taken for dead.
    """

    def __init__(
        self,
        redis: Redis,
        consumer: BuildConsumer,
        pipeline: Pipeline,
        taken: TakenBuild,
        settings: BuildWorkerSettings,
    ) -> None:
        self._queue = BuildQueue(redis)
        self._consumer = consumer
        self._pipeline = pipeline
        self._taken = taken
        self._settings = settings
        self._hold_interval_s = min(HOLD_INTERVAL_S, settings.lease_ttl_s / 3)
        self._metadata = builds_pb2.BuildMetadata(spec=taken.job.spec, target=taken.job.target)
        self._objects = pipeline.store.objects
        self._log_keeper = LogKeeper(self._objects, taken.job.build_id, settings)
        self._stage = Stage.FETCH
        self._has_news = asyncio.Event()
        self._spans: StageSpans | None = None
        self._flushing: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Runs the build to its end. Cancelling this gives the job back to the queue."""
        await self._read_metadata()
        work = asyncio.ensure_future(self._traced_work())
        hold = asyncio.ensure_future(self._keep_hold())
        keep_log = asyncio.ensure_future(self._log_keeper.keep())
        try:
            await asyncio.wait({work, hold}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await cancel_until_ended(work)
        except asyncio.CancelledError:
            await cancel_until_ended(work, keep_log)
            await self._give_back()
            raise
        finally:
            await cancel_until_ended(hold, keep_log)
        if not hold.cancelled() and hold.result() is Hold.LOST:
            log.warning("build taken over by another worker", build=self._taken.job.build_id)
        elif work.cancelled():
            stage = self._stage.value
            await self._conclude(
                self._failed(BuildCancelledError(f"cancelled in stage {stage}", stage=stage))
            )
        else:
            await self._conclude(self._outcome(work))

    async def _traced_work(self) -> builds_pb2.BuildResult:
        job = self._taken.job
        span = tracer.start_span(
            SPAN_NAME,
            telemetry.extract(job.traceparent, job.tracestate),
            kind=trace.SpanKind.CONSUMER,
            attributes={
                semconv.MESSAGING_SYSTEM: semconv.MESSAGING_SYSTEM_VALUE,
                semconv.MESSAGING_OPERATION_TYPE: "process",
                semconv.MESSAGING_OPERATION_NAME: "build",
                semconv.MESSAGING_DESTINATION: keys.build_stream(job.target.key, job.spec.kind),
                semconv.MESSAGING_CONSUMER_GROUP: keys.BUILD_GROUP,
                semconv.MESSAGING_CLIENT_ID: self._settings.worker_id,
                semconv.MESSAGING_MESSAGE_ID: self._taken.entry_id,
                semconv.BUILD: job.build_id,
                semconv.REQUEST_MODEL: job.spec.model,
                semconv.ENGINE_KIND: job.spec.kind,
                semconv.TARGET: job.target.key,
            },
        )
        span.set_attribute(semconv.BUILD_ATTEMPT, self._metadata.attempt)
        self._spans = StageSpans(trace.set_span_in_context(span), job.spec.kind)
        # Spans are ended by hand, so that what cancels a build shows in them too.
        error: BaseException | None = None
        try:
            await self._begin(span)
            result = await self._work()
            span.set_attributes(
                {semconv.ENGINE: result.engine, semconv.CACHE: "hit" if result.cached else "miss"}
            )
        except BaseException as raised:
            error = raised
            span.set_attribute(semconv.ERROR_TYPE, type(raised).__name__)
            span.set_status(trace.StatusCode.ERROR, str(raised))
            raise
        else:
            return result
        finally:
            self._spans.end(error)
            span.end()

    async def _begin(self, span: trace.Span) -> None:
        """Takes up the log and the trace of the attempt before, and notes this one for the next."""
        attempt = self._metadata.attempt
        if attempt > 1:
            await self._log_keeper.go_on()
        self._log_keeper.log.say(f"attempt {attempt} on workers/{self._settings.worker_id}")
        await self._attempts.begin(span)
        await self._log_keeper.store()

    async def _work(self) -> builds_pb2.BuildResult:
        limit = self._settings.build_attempts
        if self._taken.deliveries > limit:
            raise BuildError(f"{limit} build workers died over this build", attempts=limit)
        spec = ModelFile.from_proto(self._taken.job.spec)
        job = self._taken.job
        run = BuildRun(job.build_id, self._metadata.attempt, spec, self._log_keeper.log, self._on_progress)
        return await self._pipeline.run(run)

    def _on_progress(self, progress: Progress) -> None:
        if self._spans is not None:
            self._spans.enter(progress.stage, is_kept=progress.is_kept)
        if progress.stage is not self._stage or progress.is_kept:
            self._flushing = asyncio.ensure_future(asyncio.to_thread(telemetry.flush))
            kept = ": done by an earlier attempt" if progress.is_kept else ""
            self._log_keeper.log.say(f"stage {progress.stage.value}{kept}")
        self._stage = progress.stage
        self._metadata.stage = progress.stage.to_proto()
        self._metadata.progress_percent = max(
            self._metadata.progress_percent, percent_done(progress.stage, progress.fraction)
        )
        self._metadata.detail = progress.detail
        self._has_news.set()

    async def _keep_hold(self) -> Hold:
        """Renews the hold and passes on news, until the job is another's or should be cancelled."""
        while True:
            operation = self._unfinished() if self._has_news.is_set() else None
            self._has_news.clear()
            try:
                hold = await self._consumer.hold(self._taken, operation)
            except UNREACHABLE as error:  # the build goes on; its news are told when Redis is back
                log.warning("state of build not written", build=self._taken.job.build_id, error=str(error))
                self._has_news.set()
                hold = Hold.HELD
            if hold is not Hold.HELD:
                return hold
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            await wait_until_set(self._has_news, self._hold_interval_s - PROGRESS_INTERVAL_S)

    async def _conclude(self, operation: operations_pb2.Operation) -> None:
        """Has the log whole and nothing half made in the store before the end is told."""
        build_id = self._taken.job.build_id
        engine = build_operation.result_of(operation).engine.removeprefix("engines/")
        self._log_keeper.log.say(f"engine {engine}" if engine else f"no engine: {operation.error.message}")
        hold = asyncio.ensure_future(self._hold_on())
        try:
            await self._log_keeper.store(engine)
            await asyncio.to_thread(remove_leftovers, self._objects, build_id)
        except MeshError as error:  # a sweep will remove them
            log.warning("leftovers not removed", build=build_id, error=error.message)
        finally:
            await cancel_until_ended(hold)
        await self._finish(operation)

    async def _hold_on(self) -> None:
        """Renews the hold, whatever others want of the build."""
        while True:
            with suppress(*UNREACHABLE):
                await self._consumer.hold(self._taken)
            await asyncio.sleep(self._hold_interval_s)

    def _outcome(self, work: asyncio.Future[builds_pb2.BuildResult]) -> operations_pb2.Operation:
        build_id = self._taken.job.build_id
        error = work.exception()
        if error is None:
            return build_operation.succeeded(build_id, self._metadata, work.result())
        if not isinstance(error, MeshError):
            log.error("unforeseen error", build=build_id, exc_info=error)
            error = BuildError(f"internal error in stage {self._stage.value}; the build worker's log has it")
        return self._failed(error)

    def _failed(self, error: MeshError) -> operations_pb2.Operation:
        log.warning("build failed", build=self._taken.job.build_id, error=error.message)
        return build_operation.failed(self._taken.job.build_id, self._metadata, error.to_status())

    def _unfinished(self) -> operations_pb2.Operation:
        return build_operation.unfinished(self._taken.job.build_id, self._metadata)

    async def _read_metadata(self) -> None:
        """Goes on from what the operation's log says."""
        try:
            operation = await self._queue.get(self._taken.job.build_id)
            self._metadata = build_operation.metadata_of(operation)
        except NotFoundError:  # somebody lost it; the job says enough
            self._metadata.create_time.GetCurrentTime()
        self._metadata.worker = f"workers/{self._settings.worker_id}"
        self._metadata.progress_percent = 0
        self._metadata.attempt += 1
        self._attempts = Attempts(
            self._objects, self._taken.job, self._metadata.attempt, self._settings.worker_id
        )

    async def _give_back(self) -> None:
        self._log_keeper.log.say("given back: the build worker stops")
        await self._log_keeper.store()
        with suppress(MeshError):  # then the next attempt takes this one for dead
            await self._attempts.give_back()
        self._metadata.worker = ""
        self._metadata.stage = builds_pb2.BUILD_STAGE_QUEUED
        self._metadata.progress_percent = 0
        self._metadata.detail = "given back by a build worker that stopped"
        try:
            await self._consumer.give_back(self._taken, self._unfinished())
        except UNREACHABLE as error:  # another worker will claim it
            log.warning("build not given back", build=self._taken.job.build_id, error=str(error))

    async def _finish(self, operation: operations_pb2.Operation) -> None:
        while True:
            try:
                if not await self._consumer.finish(self._taken, operation):
                    log.warning("build was taken over", build=self._taken.job.build_id)
            except UNREACHABLE as error:
                log.warning("end of build not written", build=self._taken.job.build_id, error=str(error))
                await asyncio.sleep(HOLD_INTERVAL_S)
            else:
                return
