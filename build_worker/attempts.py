"""What one attempt of a build tells the next one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from opentelemetry import trace

from build_worker.scratch import Attempt, Scratch
from build_worker.stage_spans import tracer
from mesh import semconv, telemetry

if TYPE_CHECKING:
    from enginemesh.internal.v1 import queue_pb2
    from mesh.object_store import ObjectStore

SPAN_NAME = "build"


class Attempts:
    """The attempts of one build, as its scratch area knows them.

    Args:
        objects: The store.
        job: The build.
        number: Of this attempt, from 1.
        worker: This worker.
    """

    def __init__(self, objects: ObjectStore, job: queue_pb2.BuildJob, number: int, worker: str) -> None:
        self._scratch = Scratch(objects, job.build_id)
        self._job = job
        self._attempt = Attempt(number=number, worker=worker)

    async def begin(self, span: trace.Span) -> None:
        """Notes this attempt and ties its span to the one before."""
        if self._attempt.number > 1:
            earlier = await asyncio.to_thread(self._scratch.attempt)
            if earlier is not None:
                self._tie(span, earlier)
        traceparent, tracestate = telemetry.inject(span)
        self._attempt = self._attempt.model_copy(
            update={"traceparent": traceparent, "tracestate": tracestate, "start_ns": time.time_ns()}
        )
        await asyncio.to_thread(self._scratch.write_attempt, self._attempt)

    async def give_back(self) -> None:
        """Notes that this attempt was ended for another worker to go on."""
        ended = self._attempt.model_copy(update={"has_ended": True})
        await asyncio.to_thread(self._scratch.write_attempt, ended)

    def _tie(self, span: trace.Span, earlier: Attempt) -> None:
        context = telemetry.extract(earlier.traceparent, earlier.tracestate)
        lost = trace.get_current_span(context).get_span_context()
        if not lost.is_valid:
            return
        attributes: dict[str, str | int] = {
            semconv.BUILD: self._job.build_id,
            semconv.BUILD_ATTEMPT: earlier.number,
            semconv.WORKER: earlier.worker,
        }
        span.add_link(lost, attributes)
        if not earlier.has_ended:
            telemetry.end_lost_span(
                tracer,
                SPAN_NAME,
                lost,
                telemetry.extract(self._job.traceparent, self._job.tracestate),
                start_ns=earlier.start_ns,
                attributes=attributes,
                reason=f"the build worker {earlier.worker} died",
            )
