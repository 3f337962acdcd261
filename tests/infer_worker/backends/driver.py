"""Drives an engine backend step by step, as its process would."""

from __future__ import annotations

from dataclasses import dataclass, field

from enginemesh.internal.v1 import engine_process_pb2, step_pb2


@dataclass
class Result:
    """What came of one sequence."""

    ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    reason: str = ""
    error: str = ""
    steps: int = 0


def add_command(identifier: int, prompt, *, resumed: int = 0, **sampling) -> engine_process_pb2.AddSequence:
    """The command that starts a sequence; greedy unless told otherwise."""
    command = engine_process_pb2.AddSequence(id=identifier, prompt_ids=prompt, resumed=resumed)
    for name, value in {"temperature": 0.0, **sampling}.items():
        if isinstance(value, (list, tuple)):
            getattr(command.sampling, name).extend(value)
        else:
            setattr(command.sampling, name, value)
    return command


class Driver:
    """Adds, steps and collects; asserts that every step is well formed."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.results: dict[int, Result] = {}
        self._last_id = 0

    def add(self, prompt, **fields) -> int:
        self._last_id += 1
        self.results[self._last_id] = Result()
        self.backend.add(add_command(self._last_id, prompt, **fields))
        return self._last_id

    def step(self) -> step_pb2.StepOutput:
        output = self.backend.step()
        assert len(output.logprobs) in (0, len(output.token_ids))
        start = 0
        for identifier, offset, count in zip(output.ids, output.offsets, output.counts, strict=True):
            result = self.results[identifier]
            assert offset == len(result.ids)
            assert not result.reason
            result.ids += output.token_ids[start : start + count]
            result.logprobs += output.logprobs[start : start + count]
            result.steps += 1
            start += count
        for finish in output.finishes:
            name = step_pb2.SequenceFinishReason.Name(finish.reason)
            self.results[finish.id].reason = name.removeprefix("SEQUENCE_FINISH_REASON_")
            self.results[finish.id].error = finish.error
        return output

    def run(self) -> None:
        while self.backend.has_work():
            self.step()

    def generate(self, prompt, **fields) -> Result:
        """Runs one sequence, and whatever else is in flight, to the end."""
        identifier = self.add(prompt, **fields)
        self.run()
        return self.results[identifier]
