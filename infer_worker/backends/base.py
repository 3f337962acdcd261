"""What every engine kind offers to the engine's process, and the checks that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from enginemesh.internal.v1 import step_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from enginemesh.internal.v1 import engine_process_pb2
    from mesh.manifest import Manifest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a loaded engine can hold: sequences in flight, and tokens of one sequence, prompt included."""

    slots: int
    max_seq_len: int


class EngineBackend(Protocol):
    """One engine. Made and called by one thread of the engine's process; only `versions` is for others too.

    A request never makes a method raise: what is wrong with it comes out of `step` as its finish. A method
    that does raise ends the process.
    """

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions of what runs the engine, by the names that manifests use; empty if it is not installed.

        Cheap and without importing the engine's library, as the worker asks before it downloads anything.
        """

    def load(self, folder: Path, manifest: Manifest) -> EngineLimits:
        """Loads the engine whose files lie in `folder`; called once, first."""

    def warm_up(self) -> None:
        """Runs something small through the engine, so that the first request does not pay for it."""

    def add(self, command: engine_process_pb2.AddSequence) -> None:
        """Takes a sequence in; its prompt ends with what earlier attempts generated."""

    def cancel(self, sequence_id: int) -> None:
        """Stops a sequence and frees its slot; nothing more of it comes out. Unknown ids are ignored."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> step_pb2.StepOutput:
        """One step of every sequence in flight, and what it gave to each. May be empty."""

    def stats(self) -> engine_process_pb2.EngineStats:
        """How full the engine is."""


class RefusedSequenceError(Exception):
    """A sequence that this engine can never run; the message says why."""


def new_tokens_allowed(command: engine_process_pb2.AddSequence, *, max_seq_len: int, vocab_size: int) -> int:
    """New tokens that a sequence may get at most; 0 if it is complete as it came.

    Raises:
        RefusedSequenceError: the prompt is empty, too long, or has ids outside the vocabulary.
    """
    length = len(command.prompt_ids)
    room = max_seq_len - length
    if length == 0:
        raise RefusedSequenceError("prompt_ids: empty")
    if max(command.prompt_ids) >= vocab_size:
        raise RefusedSequenceError(
            f"prompt_ids: {max(command.prompt_ids)} is no token; the vocabulary has {vocab_size}"
        )
    # An earlier attempt may have filled the sequence to the brim before its worker died.
    if room < (0 if command.resumed else 1):
        raise RefusedSequenceError(
            f"prompt_ids: {length} tokens leave no room in a sequence of {max_seq_len}"
        )
    wanted = command.sampling.max_tokens if command.sampling.HasField("max_tokens") else room
    return min(wanted, room)


def refused(sequence_id: int, why: str) -> step_pb2.SequenceFinish:
    """The finish of a sequence that this engine can never run."""
    return step_pb2.SequenceFinish(id=sequence_id, reason=step_pb2.SEQUENCE_FINISH_REASON_REFUSED, error=why)


def failed(sequence_id: int, why: str) -> step_pb2.SequenceFinish:
    """The finish of a sequence that went wrong here and may go well elsewhere."""
    return step_pb2.SequenceFinish(id=sequence_id, reason=step_pb2.SEQUENCE_FINISH_REASON_ERROR, error=why)


def at_length(sequence_id: int) -> step_pb2.SequenceFinish:
    """The finish of a sequence that got all the tokens it may have."""
    return step_pb2.SequenceFinish(id=sequence_id, reason=step_pb2.SEQUENCE_FINISH_REASON_LENGTH)


def at_stop(sequence_id: int) -> step_pb2.SequenceFinish:
    """The finish of a sequence whose last token ends it."""
    return step_pb2.SequenceFinish(id=sequence_id, reason=step_pb2.SEQUENCE_FINISH_REASON_STOP)
