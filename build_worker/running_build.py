"""One job in a worker's hands: runs it, holds it, says how far it is and how it ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog
from opentelemetry import trace

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
from mesh.waiting import wait_until_set

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
DELIVERIES_LIMIT = 3
"""A job that so many workers had, none of which lived to say how it ended, is given up."""

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
        self._worker_id = settings.worker_id
        self._hold_interval_s = min(HOLD_INTERVAL_S, settings.lease_ttl_s / 3)
        self._metadata = builds_pb2.BuildMetadata(spec=taken.job.spec, target=taken.job.target)
        self._stage = Stage.FETCH
        self._has_news = asyncio.Event()
        self._spans: StageSpans | None = None

    async def run(self) -> None:
        """Runs the build to its end. Cancelling this gives the job back to the queue."""
        await self._read_metadata()
        work = asyncio.ensure_future(self._traced_work())
        hold = asyncio.ensure_future(self._keep_hold())
        try:
            await asyncio.wait({work, hold}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._stop(work)
                await self._after_stop(hold.result())
                return
        except asyncio.CancelledError:
            await self._stop(work)
            await self._give_back()
            raise
        finally:
            hold.cancel()
        await self._finish(self._outcome(work))

    async def _traced_work(self) -> builds_pb2.BuildResult:
        job = self._taken.job
        span = tracer.start_span(
            "build",
            telemetry.extract(job.traceparent, job.tracestate),
            kind=trace.SpanKind.CONSUMER,
            attributes={
                semconv.MESSAGING_SYSTEM: semconv.MESSAGING_SYSTEM_VALUE,
                semconv.MESSAGING_OPERATION_TYPE: "process",
                semconv.MESSAGING_OPERATION_NAME: "build",
                semconv.MESSAGING_DESTINATION: keys.build_stream(job.target.key, job.spec.kind),
                semconv.MESSAGING_CONSUMER_GROUP: keys.BUILD_GROUP,
                semconv.MESSAGING_CLIENT_ID: self._worker_id,
                semconv.MESSAGING_MESSAGE_ID: self._taken.entry_id,
                semconv.BUILD: job.build_id,
                semconv.REQUEST_MODEL: job.spec.model,
                semconv.ENGINE_KIND: job.spec.kind,
                semconv.TARGET: job.target.key,
            },
        )
        self._spans = StageSpans(trace.set_span_in_context(span), job.spec.kind)
        # Spans are ended by hand, so that what cancels a build shows in them too.
        error: BaseException | None = None
        try:
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

    async def _work(self) -> builds_pb2.BuildResult:
        if self._taken.deliveries > DELIVERIES_LIMIT:
            raise BuildError(f"{DELIVERIES_LIMIT} build workers died over this build")
        spec = ModelFile.from_proto(self._taken.job.spec)
        return await self._pipeline.run(spec, self._on_progress)

    def _on_progress(self, progress: Progress) -> None:
        if self._spans is not None:
            self._spans.enter(progress.stage)
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

    async def _after_stop(self, hold: Hold) -> None:
        if hold is Hold.LOST:
            log.warning("build taken over by another worker", build=self._taken.job.build_id)
            return
        error = BuildCancelledError(f"cancelled in stage {self._stage.value}", stage=self._stage.value)
        await self._finish(self._failed(error))

    async def _stop(self, work: asyncio.Future[builds_pb2.BuildResult]) -> None:
        work.cancel()
        await asyncio.wait({work})

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
        self._metadata.worker = f"workers/{self._worker_id}"
        self._metadata.progress_percent = 0

    async def _give_back(self) -> None:
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
