"""An engine that says what its script tells it to, when it tells it to. For tests, and to measure the mesh.

Its folder may hold `script.json`, an object with the fields of `Script`; options of the manifest with
the same names override them. Without a scripted answer each token follows from all ids before it, so a
sequence that is resumed elsewhere goes on exactly as it would have gone here.
"""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from array import array
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from enginemesh.internal.v1 import engine_process_pb2, step_pb2
from enginemesh.v1 import inference_pb2
from infer_worker.backends.base import (
    EngineLimits,
    RefusedSequenceError,
    at_length,
    at_stop,
    new_tokens_allowed,
    refused,
)
from infer_worker.step_builder import StepBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mesh.manifest import Manifest

SCRIPT_FILE = "script.json"
_SPREAD = 2_654_435_761
"""Knuth's multiplier: neighbouring states give distant tokens."""


class Script(BaseModel):
    """What the engine does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_ms: float = Field(10.0, ge=0, description="Time of a step; 0: as fast as it goes")
    prefill_ms: float = Field(0.0, ge=0, description="Time from taking a sequence in to its first token")
    load_ms: float = Field(0.0, ge=0, description="Time to load")
    slots: int = Field(0, ge=0, description="Sequences in flight; 0: as many as the manifest says")
    answer: tuple[tuple[int, ...], ...] = Field(
        (), description="Token ids of each step, the same for every prompt, then the end; empty: made up"
    )
    load_error: str = Field("", description="Loading fails with this message")
    die_after_tokens: int = Field(0, ge=0, description="The process dies after so many tokens; 0: never")
    hang_after_tokens: int = Field(0, ge=0, description="No step ends after so many tokens; 0: never")
    helpers: int = Field(0, ge=0, description="Processes that the engine starts and never stops")


@dataclass(slots=True)
class _Sequence:
    id: int
    due: float
    """Time of the first token, by the monotonic clock in seconds."""
    limit: int
    stop_ids: frozenset[int]
    top_logprobs: int | None
    chunks: Iterator[tuple[int, ...]] | None
    state: int
    """Checksum of all ids so far."""
    given: int = field(default=0)


class FakeBackend:
    """The scripted engine."""

    def __init__(self) -> None:
        self._script = Script()
        self._limits = EngineLimits(1, 1)
        self._vocab_size = 1
        self._eos_ids: frozenset[int] = frozenset()
        self._sequences: dict[int, _Sequence] = {}
        self._ended: list[step_pb2.SequenceFinish] = []
        self._next_step = 0.0
        self._tokens_given = 0

    @staticmethod
    def versions() -> dict[str, str]:
        """The script's version."""
        return {"fake": "1"}

    def load(self, folder: Path, manifest: Manifest) -> EngineLimits:
        """Reads the script.

        Raises:
            ValueError: the script is malformed, or says that loading fails.
        """
        self._script = read_script(folder, manifest)
        time.sleep(self._script.load_ms / 1000)
        if self._script.load_error:
            raise ValueError(self._script.load_error)
        for _ in range(self._script.helpers):
            _start_helper()
        self._vocab_size = manifest.tokenizer.vocab_size
        self._eos_ids = frozenset(manifest.tokenizer.eos_token_ids)
        self._limits = EngineLimits(self._script.slots or manifest.max_batch_size, manifest.max_seq_len)
        return self._limits

    def warm_up(self) -> None:
        """Nothing is cold here."""

    def add(self, command: engine_process_pb2.AddSequence) -> None:
        """Takes a sequence in; its first token comes `prefill_ms` later."""
        try:
            limit = new_tokens_allowed(
                command, max_seq_len=self._limits.max_seq_len, vocab_size=self._vocab_size
            )
        except RefusedSequenceError as error:
            self._ended.append(refused(command.id, str(error)))
            return
        if limit == 0:
            self._ended.append(at_length(command.id))
            return
        now = time.monotonic()
        if not self._sequences:
            self._next_step = now
        sampling = command.sampling
        self._sequences[command.id] = _Sequence(
            id=command.id,
            due=now + self._script.prefill_ms / 1000,
            limit=limit,
            stop_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self._eos_ids),
            top_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            chunks=self._scripted_chunks(command.resumed),
            state=zlib.crc32(array("I", command.prompt_ids).tobytes()),
        )

    def cancel(self, sequence_id: int) -> None:
        """Forgets a sequence."""
        self._sequences.pop(sequence_id, None)

    def has_work(self) -> bool:
        """Whether any sequence is left or has just ended."""
        return bool(self._sequences or self._ended)

    def step(self) -> step_pb2.StepOutput:
        """Waits for the next point of the time grid, then gives every sequence that is due its tokens."""
        self._misbehave()
        if self._sequences and not self._ended:
            self._wait_for_step()
        builder = StepBuilder()
        for finish in self._ended:
            builder.finish(finish)
        self._ended.clear()
        now = time.monotonic()
        for sequence in list(islice(self._sequences.values(), self._limits.slots)):
            if sequence.due <= now:
                self._advance(sequence, builder)
        return builder.build()

    def stats(self) -> engine_process_pb2.EngineStats:
        """Sequences in flight and waiting; the cache is as full as the slots."""
        running = min(len(self._sequences), self._limits.slots)
        return engine_process_pb2.EngineStats(
            running=running,
            waiting=len(self._sequences) - running,
            kv_cache_usage=running / self._limits.slots,
        )

    def _wait_for_step(self) -> None:
        now = time.monotonic()
        if self._next_step > now:
            time.sleep(self._next_step - now)
        # After a late step the grid moves; steps are not made up for, as no real engine could.
        self._next_step = max(self._next_step, now) + self._script.step_ms / 1000

    def _advance(self, sequence: _Sequence, builder: StepBuilder) -> None:
        ids, is_over = self._next_ids(sequence)
        finish = None
        for index, token in enumerate(ids, start=1):
            if token in sequence.stop_ids:
                ids, finish = ids[:index], at_stop(sequence.id)
                break
            if sequence.given + index == sequence.limit:
                ids, finish = ids[:index], at_length(sequence.id)
                break
        if finish is None and is_over:
            finish = at_stop(sequence.id)
        if ids:
            builder.row(sequence.id, sequence.given, ids, self._logprobs(sequence, ids))
            sequence.given += len(ids)
            self._tokens_given += len(ids)
        if finish is not None:
            builder.finish(finish)
            del self._sequences[sequence.id]

    def _next_ids(self, sequence: _Sequence) -> tuple[tuple[int, ...], bool]:
        """What a sequence gets now, and whether its script ends with it."""
        if sequence.chunks is not None:
            ids = next(sequence.chunks, None)
            return ids or (), ids is None
        token = (sequence.state * _SPREAD % 2**32) * self._vocab_size >> 32
        while token in self._eos_ids:
            token = (token + 1) % self._vocab_size
        sequence.state = zlib.crc32(token.to_bytes(4, "little"), sequence.state)
        return (token,), False

    def _scripted_chunks(self, skip: int) -> Iterator[tuple[int, ...]] | None:
        """The scripted answer from token `skip` on."""
        if not self._script.answer:
            return None
        chunks = list(self._script.answer)
        while chunks and skip >= len(chunks[0]):
            skip -= len(chunks.pop(0))
        return chain([chunks[0][skip:]], chunks[1:]) if chunks else iter(())

    def _logprobs(self, sequence: _Sequence, ids: tuple[int, ...]) -> list[inference_pb2.TokenLogprob]:
        if sequence.top_logprobs is None:
            return []
        result = []
        for token in ids:
            top = [
                inference_pb2.TopLogprob(token_id=(token + rank) % self._vocab_size, logprob=-0.5 - rank)
                for rank in range(sequence.top_logprobs)
            ]
            result.append(inference_pb2.TokenLogprob(token_id=token, logprob=-0.5, top=top))
        return result

    def _misbehave(self) -> None:
        script = self._script
        if script.die_after_tokens and self._tokens_given >= script.die_after_tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.hang_after_tokens and self._tokens_given >= script.hang_after_tokens:
            _hang()


def read_script(folder: Path, manifest: Manifest) -> Script:
    """The script of an engine.

    Raises:
        ValueError: it is not JSON, or a field is unknown or has no sense.
    """
    path = folder / SCRIPT_FILE
    fields = json.loads(path.read_bytes()) if path.exists() else {}
    options = {name: value for name, value in manifest.options.items() if name in Script.model_fields}
    return Script.model_validate({**fields, **options})


def _start_helper() -> None:
    if os.fork() == 0:
        _hang()


def _hang() -> NoReturn:
    while True:
        signal.pause()
