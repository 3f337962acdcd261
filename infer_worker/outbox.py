"""What waits to go up one link. It gathers while a write is under way, so that little waits for long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from enginemesh.internal.v1 import link_pb2, step_pb2
from infer_worker.step_builder import StepBuilder

if TYPE_CHECKING:
    from infer_worker.sequences import Sequence

FRAME_TOKENS = 32_768
"""Tokens of one message at most: with 20 log probabilities each it stays below the limit of a message."""


class Outbox:
    """Claims and news of one link.

    News are kept as the set of sequences that have some: what a slow gateway has not taken yet merges by
    itself into one row per sequence, and takes no memory beside the sequences' own.
    """

    def __init__(self) -> None:
        self._claims: list[link_pb2.Claim] = []
        self._news: dict[Sequence, None] = {}
        self._failures: list[step_pb2.SequenceFinish] = []
        self._filled = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._claims or self._news or self._failures)

    def claim(self, request_id: str, attempt: int, handle: int) -> None:
        """Asks whether this worker may run an attempt. It goes before any news of it."""
        self._claims.append(link_pb2.Claim(request_id=request_id, attempt=attempt, handle=handle))
        self.wake()

    def add_news(self, sequence: Sequence) -> None:
        """A sequence has tokens or an end to tell. Call `wake` after the last of a step."""
        self._news[sequence] = None

    def drop_news(self, sequence: Sequence) -> None:
        """Nothing more of a sequence is wanted."""
        self._news.pop(sequence, None)

    def fail(self, handle: int, why: str) -> None:
        """Tells the gateway that what it calls by this handle is not here; it goes on elsewhere."""
        reason = step_pb2.SEQUENCE_FINISH_REASON_ERROR
        self._failures.append(step_pb2.SequenceFinish(id=handle, reason=reason, error=why))
        self.wake()

    def wake(self) -> None:
        """Lets `wait` return."""
        self._filled.set()

    async def wait(self) -> None:
        """Returns once woken."""
        await self._filled.wait()
        self._filled.clear()

    def take(self) -> link_pb2.WorkerMessage | None:
        """The next message to send; None if there is none."""
        if self._claims:
            claims, self._claims = self._claims, []
            return link_pb2.WorkerMessage(claims=link_pb2.Claims(claims=claims))
        if self._news or self._failures:
            return link_pb2.WorkerMessage(step=self._frame())
        return None

    def _frame(self) -> step_pb2.StepOutput:
        builder = StepBuilder()
        for failure in self._failures:
            builder.finish(failure)
        self._failures.clear()
        room = FRAME_TOKENS
        while self._news and room > 0:
            sequence = next(iter(self._news))
            del self._news[sequence]
            start, end = sequence.sent, min(len(sequence.token_ids), sequence.sent + room)
            if start < end:
                logprobs = sequence.logprobs[start:end] if sequence.logprobs is not None else ()
                builder.row(sequence.id, start, sequence.token_ids[start:end], logprobs)
                sequence.sent = end
                room -= end - start
            if end < len(sequence.token_ids):
                self._news[sequence] = None
            elif sequence.finish is not None:
                builder.finish(sequence.finish)
        return builder.build()
