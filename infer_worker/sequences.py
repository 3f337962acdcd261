"""The sequences that run in the engine: whose each is, what came of it, and how much of that was sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginemesh.internal.v1 import step_pb2
from mesh import metrics, semconv

if TYPE_CHECKING:
    from collections.abc import Iterable

    from enginemesh.v1 import inference_pb2
    from infer_worker.outbox import Outbox
    from infer_worker.request_spans import RequestSpans

_US_PER_S = 1_000_000


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt of one request, running.

    Attributes:
        id: What the engine calls it, and its handle on the link.
        outbox: Of the link to its gateway.
        started_us: When the engine got it, in Unix microseconds.
        spans: None if it is not traced.
        token_ids: New tokens of this attempt, all of them, in case the gateway asks again.
        logprobs: One per token; None if not asked for.
        sent: How many of token_ids went to the gateway.
        first_token_us: When the first token came; 0: not yet.
        finish: Set at its end.
    """

    id: int
    outbox: Outbox
    started_us: int
    spans: RequestSpans | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] | None = None
    sent: int = 0
    first_token_us: int = 0
    finish: step_pb2.SequenceFinish | None = None


class SequenceTable:
    """Every running sequence; ended ones are not in it."""

    def __init__(self, model: str) -> None:
        self._attributes = {semconv.REQUEST_MODEL: model}
        self._by_id: dict[int, Sequence] = {}
        self._last_id = 0
        self._last_step_us = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def count(self, claimed: Iterable[int]) -> int:
        """Sequences that run or, though they have ended, are claimed under one of these handles."""
        return len(self._by_id) + sum(handle not in self._by_id for handle in claimed)

    def start(self, outbox: Outbox, spans: RequestSpans | None, *, with_logprobs: bool) -> Sequence:
        """Enters a sequence that the engine now gets."""
        self._last_id += 1
        sequence = Sequence(self._last_id, outbox, time.time_ns() // 1000, spans)
        if with_logprobs:
            sequence.logprobs = []
        self._by_id[sequence.id] = sequence
        return sequence

    def take_step(self, step: step_pb2.StepOutput) -> None:
        """Gives what a step brought to its sequences and wakes their links; rows of unknown ids are dropped.

        This runs once per step for every row, so it does little per row.
        """
        by_id = self._by_id
        tokens = list(step.token_ids)
        outboxes = set()
        start = 0
        for sequence_id, count in zip(step.ids, step.counts, strict=True):
            end = start + count
            sequence = by_id.get(sequence_id)
            if sequence is not None:
                if not sequence.token_ids:
                    sequence.first_token_us = step.unix_us
                sequence.token_ids += tokens[start:end]
                if sequence.logprobs is not None:
                    sequence.logprobs += step.logprobs[start:end]
                sequence.outbox.add_news(sequence)
                outboxes.add(sequence.outbox)
            start = end
        self._time_step(step.unix_us)
        for finish in step.finishes:
            sequence = by_id.get(finish.id)
            if sequence is not None:
                self._finish(sequence, finish, step.unix_us)
                outboxes.add(sequence.outbox)
        for outbox in outboxes:
            outbox.wake()

    def cancel(self, outbox: Outbox, handle: int) -> bool:
        """Forgets a sequence that its gateway no longer wants; False if it had ended."""
        sequence = self.forget(outbox, handle)
        if sequence is not None:
            self._observe(sequence, time.time_ns() // 1000, "cancelled")
        return sequence is not None

    def forget(self, outbox: Outbox, handle: int) -> Sequence | None:
        """Removes a sequence as if it had never run here; None if it had ended."""
        sequence = self._of_link(outbox, handle)
        if sequence is not None:
            self._remove(sequence)
            outbox.drop_news(sequence)
        return sequence

    def cancel_all(self, outbox: Outbox) -> list[int]:
        """Forgets every sequence of a link that was lost; returns their ids."""
        ids = [sequence.id for sequence in self._by_id.values() if sequence.outbox is outbox]
        return [sequence_id for sequence_id in ids if self.cancel(outbox, sequence_id)]

    def fail_all(self, why: str) -> list[Sequence]:
        """Ends every sequence with an error that makes its gateway run it elsewhere; returns them."""
        sequences = list(self._by_id.values())
        reason = step_pb2.SEQUENCE_FINISH_REASON_ERROR
        now_us = time.time_ns() // 1000
        for sequence in sequences:
            finish = step_pb2.SequenceFinish(id=sequence.id, reason=reason, error=why)
            self._finish(sequence, finish, now_us)
            sequence.outbox.wake()
        return sequences

    def send_again(self, outbox: Outbox, handle: int, offset: int) -> None:
        """Sends the tokens of a sequence again from `offset` on; if it has ended, tells that it failed."""
        sequence = self._of_link(outbox, handle)
        if sequence is None:
            outbox.fail(handle, "its tokens are no longer held")
            return
        sequence.sent = min(offset, sequence.sent)
        outbox.add_news(sequence)
        outbox.wake()

    def _of_link(self, outbox: Outbox, handle: int) -> Sequence | None:
        sequence = self._by_id.get(handle)
        return sequence if sequence is not None and sequence.outbox is outbox else None

    def _finish(self, sequence: Sequence, finish: step_pb2.SequenceFinish, now_us: int) -> None:
        self._remove(sequence)
        sequence.finish = step_pb2.SequenceFinish()
        sequence.finish.CopyFrom(finish)
        sequence.outbox.add_news(sequence)
        name = step_pb2.SequenceFinishReason.Name(finish.reason)
        reason = name.removeprefix("SEQUENCE_FINISH_REASON_").lower()
        self._observe(sequence, now_us, reason, finish.error)

    def _remove(self, sequence: Sequence) -> None:
        del self._by_id[sequence.id]
        if not self._by_id:
            self._last_step_us = 0

    def _observe(self, sequence: Sequence, now_us: int, reason: str, error: str = "") -> None:
        """Tells metrics and trace of a sequence at its end, where nobody waits for it any more."""
        if sequence.first_token_us:
            metrics.ENGINE_PREFILL_DURATION.record(
                max(0, sequence.first_token_us - sequence.started_us) / _US_PER_S, self._attributes
            )
            metrics.ENGINE_DECODE_DURATION.record(
                max(0, now_us - sequence.first_token_us) / _US_PER_S, self._attributes
            )
        if sequence.spans is not None:
            sequence.spans.record(
                started_us=sequence.started_us,
                first_token_us=sequence.first_token_us,
                ended_us=now_us,
                reason=reason,
                tokens=len(sequence.token_ids),
                error=error,
            )

    def _time_step(self, now_us: int) -> None:
        """A step lasts from the end of the one before, as long as the engine has work without a break."""
        if self._last_step_us:
            metrics.ENGINE_STEP_DURATION.record(
                max(0, now_us - self._last_step_us) / _US_PER_S, self._attributes
            )
        self._last_step_us = now_us
