"""The spans of one build's stages, one after the other without gaps, and the time that each took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry import trace

from mesh import metrics, semconv

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from build_worker.stages import Stage

tracer = trace.get_tracer("enginemesh.build_worker")


class StageSpans:
    """Opens a span when a stage begins, which ends the one before.

    Args:
        parent: Context of the build's span.
        kind: Engine kind, for the metric.
    """

    def __init__(self, parent: Context, kind: str) -> None:
        self._parent = parent
        self._kind = kind
        self._stage: Stage | None = None
        self._span: trace.Span = trace.INVALID_SPAN
        self._begin = 0.0

    def enter(self, stage: Stage, *, is_kept: bool = False) -> None:
        """A stage begins, unless it is the one that runs.

        Args:
            stage: Which.
            is_kept: An earlier attempt of the build has done it.
        """
        if stage is self._stage:
            if is_kept:
                self._span.set_attribute(semconv.BUILD_STAGE_KEPT, True)
            return
        self.end()
        self._stage = stage
        self._begin = time.monotonic()
        self._span = tracer.start_span(
            stage.value,
            self._parent,
            attributes={semconv.BUILD_STAGE: stage.value, semconv.BUILD_STAGE_KEPT: is_kept},
        )

    def end(self, error: BaseException | None = None) -> None:
        """The last stage ends; with an error, it is where the build failed."""
        if self._stage is None:
            return
        attributes = {semconv.BUILD_STAGE: self._stage.value, semconv.ENGINE_KIND: self._kind}
        if error is not None:
            attributes[semconv.ERROR_TYPE] = type(error).__name__
            self._span.set_status(trace.StatusCode.ERROR, str(error))
        metrics.BUILD_STAGE_DURATION.record(time.monotonic() - self._begin, attributes)
        self._span.end()
        self._stage = None
