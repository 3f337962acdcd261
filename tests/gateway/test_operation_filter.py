"""Filters of build listings."""

from __future__ import annotations

import pytest

from enginemesh.v1 import builds_pb2
from gateway.operation_filter import FILTER_LIMIT, OperationFilter
from mesh import build_operation
from mesh.errors import BuildError, InvalidFieldError


def metadata():
    made = builds_pb2.BuildMetadata(
        spec=builds_pb2.ModelSpec(model="m", kind="fake"),
        stage=builds_pb2.BUILD_STAGE_COMPILE,
        worker="workers/b1",
    )
    made.target.key = "cpu-x86_64-avx2"
    return made


RUNNING = build_operation.unfinished("1", metadata())
FAILED = build_operation.failed("2", metadata(), BuildError("no").to_status())


@pytest.mark.parametrize(
    ("text", "running", "failed"),
    [
        ("", True, True),
        ("done=true", False, True),
        ("done = FALSE", True, False),
        ("outcome = failed", False, True),
        ("outcome != failed", True, False),
        ("stage = compile", True, False),
        ("model = m AND worker = b1", True, True),
        ('target = "cpu-x86_64-avx2" and done = true', False, True),
        ("model = M", False, False),
        ('model = ""', False, False),
    ],
)
def test_filter_accepts_what_it_says(text, running, failed):
    wanted = OperationFilter(text)

    assert (wanted.accepts(RUNNING), wanted.accepts(FAILED)) == (running, failed)
    assert bool(wanted) is bool(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("done", "done"),
        ("done = true model = m", "model = m"),
        ("done = true AND", "AND"),
        ("AND done = true", "AND"),
        ("colour = red", "no field 'colour'"),
        ("model = m OR model = n", "OR"),
        ("(done = true)", "done"),
        ("model = " + "x" * FILTER_LIMIT, "at most"),
    ],
)
def test_what_is_no_filter_is_refused(text, words):
    with pytest.raises(InvalidFieldError, match="filter: ") as caught:
        OperationFilter(text)

    assert words in caught.value.message
