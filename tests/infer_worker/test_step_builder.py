"""Columns of a step."""

from __future__ import annotations

from enginemesh.internal.v1 import step_pb2
from enginemesh.v1 import inference_pb2
from infer_worker.step_builder import StepBuilder


def _logprob(token):
    return inference_pb2.TokenLogprob(token_id=token, logprob=-1)


def test_rows_become_columns():
    builder = StepBuilder()
    builder.row(3, 10, [7, 8])
    builder.row(4, 0, [])
    builder.finish(step_pb2.SequenceFinish(id=4))
    step = builder.build()
    assert (list(step.ids), list(step.offsets), list(step.counts)) == ([3, 4], [10, 0], [2, 0])
    assert list(step.token_ids) == [7, 8]
    assert not step.logprobs
    assert [finish.id for finish in step.finishes] == [4]
    assert step.unix_us > 0


def test_logprobs_are_one_per_token_once_any_row_has_them():
    builder = StepBuilder()
    builder.row(1, 0, [5, 6])
    builder.row(2, 0, [7], [_logprob(7)])
    builder.row(3, 0, [8])
    step = builder.build()
    assert [logprob.token_id for logprob in step.logprobs] == [0, 0, 7, 0]
