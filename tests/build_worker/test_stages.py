"""How far a build is as a whole."""

from __future__ import annotations

from build_worker.stages import Stage, percent_done
from enginemesh.v1 import builds_pb2


def test_percent_grows_from_stage_to_stage_and_stays_below_100():
    points = [percent_done(stage, fraction) for stage in Stage for fraction in (0.0, 0.5, 1.0)]

    assert points == sorted(points)
    assert points[0] == 0
    assert points[-1] == 99


def test_fraction_out_of_range_is_cut():
    assert percent_done(Stage.CONVERT, -1) == percent_done(Stage.CONVERT, 0)
    assert percent_done(Stage.CONVERT, 7) == percent_done(Stage.CONVERT, 1)


def test_every_stage_has_its_proto():
    assert [stage.to_proto() for stage in Stage] == [
        builds_pb2.BUILD_STAGE_FETCH,
        builds_pb2.BUILD_STAGE_CONVERT,
        builds_pb2.BUILD_STAGE_QUANTISE,
        builds_pb2.BUILD_STAGE_COMPILE,
        builds_pb2.BUILD_STAGE_PUBLISH,
    ]
