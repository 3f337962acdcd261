"""Clients of `enginemesh chaos`: they stream, misbehave as clients do, and check every promise."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from enginemesh.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

if TYPE_CHECKING:
    import random

PROMPTS = tuple(
    f"{subject} {verb}" for subject in ("Rain", "A clock", "The river", "Bread") for verb in ("is", "has")
)
LENGTHS = (4, 16, 48, 96)
CALL_LIMIT_S = 60.0
SHORT_DEADLINE_S = (0.05, 1.5)
DEADLINE_SLACK_S = 1.0
SLOW_READ_S = 0.05
BEHAVIOURS = {"reads": 16, "reads slowly": 1, "cancels": 2, "has a short deadline": 1}


@dataclass
class Tally:
    """What the clients saw."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    expired: int = 0
    moves: int = 0
    longest_pause_s: float = 0.0
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    """A greedy request, whose answer is always the same."""

    prompt: str
    max_tokens: int

    def message(self, model: str) -> inference_pb2.GenerateRequest:
        """As the gateway takes it."""
        sampling = sampling_pb2.SamplingParams(max_tokens=self.max_tokens, temperature=0, ignore_eos=True)
        return inference_pb2.GenerateRequest(
            model=model, prompt=self.prompt, sampling=sampling, return_token_ids=True
        )


QUESTIONS = tuple(Question(prompt, length) for prompt in PROMPTS for length in LENGTHS)


class Clients:
    """Clients of one gateway.

    Args:
        stub: Of the gateway.
        model: That they ask.
    """

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, model: str) -> None:
        self._stub = stub
        self._model = model
        self._truth: dict[Question, list[int]] = {}
        self.tally = Tally()

    async def learn(self) -> None:
        """Asks every question once, undisturbed."""
        for question in QUESTIONS:
            tokens: list[int] = []
            async for message in self._stub.Generate(question.message(self._model), timeout=CALL_LIMIT_S):
                tokens += message.delta.token_ids
            self._truth[question] = tokens

    async def ask(self, chance: random.Random) -> None:
        """One request, in a manner drawn by chance; what breaks a promise is noted."""
        question = chance.choice(QUESTIONS)
        behaviour = chance.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
        self.tally.requests += 1
        began = time.monotonic()
        timeout = chance.uniform(*SHORT_DEADLINE_S) if behaviour == "has a short deadline" else CALL_LIMIT_S
        call = self._stub.Generate(question.message(self._model), timeout=timeout)
        try:
            await self._read(call, question, behaviour, chance)
        except asyncio.CancelledError:
            if behaviour != "cancels":
                raise
            self.tally.cancelled += 1
        except grpc.aio.AioRpcError as error:
            self._check_error(error, question, behaviour)
        took = time.monotonic() - began
        if took > timeout + DEADLINE_SLACK_S:
            self._violation(
                question, f"ended {took:.1f} s after its call, with a deadline of {timeout:.1f} s"
            )

    async def _read(self, call, question: Question, behaviour: str, chance: random.Random) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - grpc's call has no public type
        cancel_after = chance.randint(1, question.max_tokens) if behaviour == "cancels" else None
        tokens: list[int] = []
        ends = 0
        last = time.monotonic()
        async for message in call:
            now = time.monotonic()
            if tokens and behaviour == "reads":
                self.tally.longest_pause_s = max(self.tally.longest_pause_s, now - last)
            last = now
            if ends:
                self._violation(question, "a message came after the terminal one")
            tokens += message.delta.token_ids
            if message.HasField("finished"):
                ends += 1
                self.tally.moves += message.finished.timings.attempts - 1
            if tokens != self._truth[question][: len(tokens)]:
                self._violation(question, f"tokens differ from the undisturbed answer: {tokens}")
                call.cancel()
                return
            if cancel_after is not None and len(tokens) >= cancel_after and not ends:
                call.cancel()
            if behaviour == "reads slowly":
                await asyncio.sleep(SLOW_READ_S)
        if ends != 1:
            self._violation(question, f"{ends} terminal messages")
        elif tokens != self._truth[question]:
            self._violation(question, f"{len(tokens)} tokens of {len(self._truth[question])}")
        self.tally.finished += 1

    def _check_error(self, error: grpc.aio.AioRpcError, question: Question, behaviour: str) -> None:
        code = error.code()
        if behaviour == "has a short deadline" and code == grpc.StatusCode.DEADLINE_EXCEEDED:
            self.tally.expired += 1
        elif behaviour == "cancels" and code == grpc.StatusCode.CANCELLED:
            self.tally.cancelled += 1
        else:
            self._violation(question, f"{code.name}: {error.details()}")

    def _violation(self, question: Question, what: str) -> None:
        self.tally.violations.append(f"{question.prompt!r}, {question.max_tokens} tokens: {what}")
