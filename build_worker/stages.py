"""The stages of a build, and how far a build is as a whole."""

from __future__ import annotations

import enum

from enginemesh.v1 import builds_pb2


class Stage(enum.Enum):
    """What a build does at this moment; the value names its span."""

    FETCH = "fetch"
    CONVERT = "convert"
    QUANTISE = "quantise"
    COMPILE = "compile"
    PUBLISH = "publish"

    def to_proto(self) -> builds_pb2.BuildStage.ValueType:
        """The same as enginemesh.v1.BuildStage."""
        return builds_pb2.BuildStage.Value(f"BUILD_STAGE_{self.name}")


# Shares of the whole time, as measured on a small model; good enough for a bar that never stands still long.
_SHARES = {Stage.FETCH: 5, Stage.CONVERT: 40, Stage.QUANTISE: 35, Stage.COMPILE: 15, Stage.PUBLISH: 5}


def percent_done(stage: Stage, fraction: float) -> int:
    """Of all stages together, 0 to 99; `fraction` is how much of `stage` is done, 0 to 1."""
    stages = list(_SHARES)
    before = sum(_SHARES[earlier] for earlier in stages[: stages.index(stage)])
    return min(99, int(before + _SHARES[stage] * min(1.0, max(0.0, fraction))))
