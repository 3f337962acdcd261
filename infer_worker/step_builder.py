"""Builds a StepOutput column by column, for engines and for links alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from enginemesh.internal.v1 import step_pb2
from enginemesh.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_LOGPROB = inference_pb2.TokenLogprob()


class StepBuilder:
    """Rows and ends of one step, in plain lists until `build`: a message is cheapest to fill at once."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[inference_pb2.TokenLogprob] = []
        self._finishes: list[step_pb2.SequenceFinish] = []

    def __bool__(self) -> bool:
        return bool(self._ids or self._finishes)

    def row(
        self,
        sequence_id: int,
        offset: int,
        token_ids: Sequence[int],
        logprobs: Sequence[inference_pb2.TokenLogprob] = (),
    ) -> None:
        """Adds the new tokens of one sequence; at most one row each.

        Args:
            sequence_id: Whose.
            offset: New tokens that this attempt gave before.
            token_ids: What came now.
            logprobs: One per token, or none if the sequence did not ask for them.
        """
        if logprobs and len(self._logprobs) < len(self._token_ids):
            self._fill_logprobs()
        self._ids.append(sequence_id)
        self._offsets.append(offset)
        self._counts.append(len(token_ids))
        self._token_ids += token_ids
        if logprobs:
            self._logprobs += logprobs

    def finish(self, finish: step_pb2.SequenceFinish) -> None:
        """Adds the end of one sequence."""
        self._finishes.append(finish)

    def build(self) -> step_pb2.StepOutput:
        """The message, with the present time."""
        if self._logprobs:
            self._fill_logprobs()
        return step_pb2.StepOutput(
            ids=self._ids,
            offsets=self._offsets,
            counts=self._counts,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finishes=self._finishes,
            unix_us=time.time_ns() // 1000,
        )

    def _fill_logprobs(self) -> None:
        # One per token or none at all: rows that did not ask stand beside rows that did.
        missing = len(self._token_ids) - len(self._logprobs)
        self._logprobs += [_NO_LOGPROB] * missing
