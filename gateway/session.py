"""A gateway's state of one request: its tokens so far, what the client has of them, and how it ends.

Nothing here waits or sends. Links put tokens in, the request's handler takes messages out, and the
request table moves it between states; whoever puts something in that the handler waits for calls `wake`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry import trace

from enginemesh.internal.v1 import queue_pb2, step_pb2
from enginemesh.v1 import inference_pb2
from mesh.errors import AttemptsExhaustedError, MeshError, UnsupportedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from enginemesh.v1 import sampling_pb2
    from gateway.output import OutputStream
    from gateway.request_table import LinkSessions
    from mesh.bus.requests import Ticket
    from mesh.telemetry import NotedSpan

MICROSECOND = 1_000_000


class State(enum.Enum):
    """Where a request is."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Timeline:
    """When things happened, in seconds of the event loop's clock; 0: not yet."""

    arrived: float
    queued: float = 0.0
    first_token: float = 0.0
    queue_total: float = 0.0
    """Queue time of all attempts together, in seconds."""


@dataclass(slots=True, eq=False)
class Session:
    """One accepted request.

    Attributes:
        sampling: As the client sent it, with max_tokens resolved.
        engine: Digest of the only engine whose queue it may wait in; empty: the model's queue.
        engines: Digests of the engines that can run it.
        eos_token_ids: End-of-sequence tokens of the model; empty if the request ignores them.
        token_ids: Every token generated, over all attempts.
        attempt_base: How many of token_ids earlier attempts made; frame offsets count from here.
    """

    request_id: str
    model: str
    prompt_ids: Sequence[int]
    sampling: sampling_pb2.SamplingParams
    eos_token_ids: frozenset[int]
    output: OutputStream
    timeline: Timeline
    span: trace.Span = trace.INVALID_SPAN
    client: str = ""
    priority: str = "normal"
    engine: str = ""
    engines: frozenset[str] = frozenset()
    return_token_ids: bool = False
    max_attempts: int = 3
    max_waiting_s: float = 0.0
    """How long it may wait for its first worker; 0: until its deadline."""
    traceparent: str = ""
    tracestate: str = ""
    waits: list[NotedSpan] = field(default_factory=list)
    """Its times in a queue, one for each attempt; empty if it is not traced."""

    state: State = State.QUEUED
    attempt: int = 1
    attempt_base: int = 0
    ticket: Ticket | None = None
    link: LinkSessions | None = None
    handle: int = 0
    worker_id: str = ""
    worker_engine: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    finish: step_pb2.SequenceFinish | None = None
    error: MeshError | None = None
    taken: int = 0
    """How many of token_ids went through the detokeniser."""
    terminal: inference_pb2.FinishReason.ValueType | None = None
    stop_string: str = ""
    _waiter: asyncio.Future[None] | None = None

    # -- put in by links and the request table --------------------------------------------------------

    def accept(self, offset: int, ids: Sequence[int], logprobs: Sequence[inference_pb2.TokenLogprob]) -> bool:
        """Takes one row of a frame; False if tokens are missing before it, which must be sent again.

        A row that repeats tokens already here gives only what is new, so none is ever doubled.
        """
        known = len(self.token_ids) - self.attempt_base
        if offset > known:
            return False
        if offset < known:
            ids, logprobs = ids[known - offset :], logprobs[known - offset :]
        if ids:
            self.token_ids.extend(ids)
            if logprobs and self.sampling.HasField("logprobs"):  # a frame has them for all rows or none
                self.logprobs.extend(logprobs)
            self.wake()
        return True

    def close(self, finish: step_pb2.SequenceFinish) -> None:
        """The engine ended this sequence."""
        self.finish = finish
        self.wake()

    def fail(self, error: MeshError) -> None:
        """Ends the request with an error; the first one counts."""
        if self.error is None:
            self.error = error
            self.wake()

    def begin_attempt(self) -> bool:
        """Makes the next attempt current; False if none is left or none is needed.

        Tokens that arrived stay: the next worker goes on after them.
        """
        self.link, self.handle, self.ticket = None, 0, None
        if self._is_complete():
            self.wake()
            return False
        if self.attempt >= self.max_attempts:
            self.fail(
                AttemptsExhaustedError(
                    f"{self.attempt} attempts failed; the last was on worker {self.worker_id or 'none'}",
                    attempts=self.attempt,
                )
            )
            return False
        self.attempt += 1
        self.attempt_base = len(self.token_ids)
        self.finish = None
        return True

    def _is_complete(self) -> bool:
        """Whether the tokens alone show that generation is over, though no worker said so."""
        if not self.token_ids or self.finish is not None:
            return self.finish is not None and self.finish.reason in _GOOD_REASONS
        last = self.token_ids[-1]
        if last in self.eos_token_ids or last in self.sampling.stop_token_ids:
            self.finish = step_pb2.SequenceFinish(reason=step_pb2.SEQUENCE_FINISH_REASON_STOP)
        elif len(self.token_ids) >= self.sampling.max_tokens:
            self.finish = step_pb2.SequenceFinish(reason=step_pb2.SEQUENCE_FINISH_REASON_LENGTH)
        return self.finish is not None

    # -- taken out by the handler ---------------------------------------------------------------------

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Returns as soon as `drain` may have something."""
        if self.has_news:
            return
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def has_news(self) -> bool:
        """Whether there is anything that the client does not have yet."""
        return self.taken < len(self.token_ids) or self.finish is not None or self.error is not None

    def wake(self) -> None:
        """Lets `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def drain(self) -> inference_pb2.Delta | None:
        """What came since the last call, as one delta; sets `terminal` once the answer is complete.

        Tokens that piled up while the client was slow come out together.

        Raises:
            MeshError: the request failed; what was generated before was drained by earlier calls.
        """
        if self.error is not None and self.taken == len(self.token_ids):
            self.error.metadata["tokens_sent"] = str(self.taken)
            raise self.error
        fresh = self.token_ids[self.taken :]
        self.taken += len(fresh)
        is_last = self.finish is not None
        text, stop = "", None
        if fresh:
            text, stop = self.output.push(self._without_stop_token(fresh) if is_last else fresh)
        if is_last and stop is None:
            text, stop = self._finish(text)
        if stop is not None:
            self.stop_string = stop
            self.terminal = inference_pb2.FINISH_REASON_STOP
        return self._delta(text, fresh)

    def _finish(self, text: str) -> tuple[str, str | None]:
        """Settles how the answer ends, and adds the text that was held back."""
        assert self.finish is not None  # noqa: S101 - the caller's condition
        if self.finish.reason == step_pb2.SEQUENCE_FINISH_REASON_REFUSED:
            self.error = UnsupportedError(self.finish.error, tokens_sent=self.taken)
            raise self.error
        is_stop = self.finish.reason == step_pb2.SEQUENCE_FINISH_REASON_STOP
        self.terminal = inference_pb2.FINISH_REASON_STOP if is_stop else inference_pb2.FINISH_REASON_LENGTH
        rest, stop = self.output.finish()
        return text + rest, stop

    def _without_stop_token(self, fresh: list[int]) -> list[int]:
        assert self.finish is not None  # noqa: S101 - the caller's condition
        if self.finish.reason == step_pb2.SEQUENCE_FINISH_REASON_STOP:
            return fresh[:-1]
        return fresh

    def _delta(self, text: str, fresh: list[int]) -> inference_pb2.Delta | None:
        logprobs, self.logprobs = self.logprobs, []
        ids = fresh if self.return_token_ids else ()
        if not (text or ids or logprobs):
            return None
        return inference_pb2.Delta(text=text, token_ids=ids, logprobs=logprobs)

    # -- messages -------------------------------------------------------------------------------------

    def finished(self, now: float) -> inference_pb2.Finished:
        """The terminal message; `terminal` must be set."""
        message = inference_pb2.Finished(
            reason=self.terminal or inference_pb2.FINISH_REASON_UNSPECIFIED,
            stop_string=self.stop_string,
            request_id=self.request_id,
            engine=f"engines/{self.worker_engine}",
            worker=f"workers/{self.worker_id}",
        )
        message.usage.prompt_tokens = len(self.prompt_ids)
        message.usage.completion_tokens = self.taken
        if self.finish is not None:
            if self.finish.HasField("cached_prompt_tokens"):
                message.usage.cached_prompt_tokens = self.finish.cached_prompt_tokens
            if self.finish.reason == step_pb2.SEQUENCE_FINISH_REASON_STOP and not self.stop_string:
                message.stop_token_id = self.token_ids[-1]
        self._fill_timings(message.timings, now)
        return message

    def queued_request(self, gateway_id: str, gateway_address: str) -> queue_pb2.QueuedRequest:
        """The queue entry of the present attempt."""
        entry = queue_pb2.QueuedRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            gateway_id=gateway_id,
            gateway_address=gateway_address,
            prompt_ids=self.prompt_ids,
            generated_ids=self.token_ids,
            sampling=self.sampling,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
        )
        if self.token_ids and entry.sampling.HasField("seed"):
            # A fresh stream of random numbers for the rest: restarting the old one would draw again what
            # drew the tokens that are kept.
            entry.sampling.seed = (entry.sampling.seed + len(self.token_ids)) % 2**64
        return entry

    def _fill_timings(self, timings: inference_pb2.Timings, now: float) -> None:
        line = self.timeline
        for duration, seconds in (
            (timings.admission, line.queued - line.arrived),
            (timings.queue, line.queue_total),
            (timings.time_to_first_token, line.first_token - line.arrived),
            (timings.total, now - line.arrived),
        ):
            duration.FromMicroseconds(max(0, round(seconds * MICROSECOND)))
        timings.attempts = self.attempt


_GOOD_REASONS = (step_pb2.SEQUENCE_FINISH_REASON_STOP, step_pb2.SEQUENCE_FINISH_REASON_LENGTH)
