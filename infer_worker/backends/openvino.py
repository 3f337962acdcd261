"""Kind `openvino`: OpenVINO GenAI's continuous batching on a CPU, with paged KV cache and prefix caching.

After a move to another worker, presence and frequency penalties count only what is generated there: the
engine has no way to be told of tokens that were generated before. The repetition penalty, which also
counts the prompt, goes on as before.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginemesh.internal.v1 import engine_process_pb2, step_pb2
from enginemesh.v1 import inference_pb2
from infer_worker.backends.base import (
    EngineLimits,
    RefusedSequenceError,
    at_length,
    at_stop,
    failed,
    new_tokens_allowed,
    refused,
)
from infer_worker.backends.openvino_settings import cache_blocks, plugin_properties
from infer_worker.backends.openvino_speculation import Room, Speculation
from infer_worker.step_builder import StepBuilder
from mesh.sizing import BLOCK_TOKENS
from mesh.versions import installed_versions

if TYPE_CHECKING:
    from pathlib import Path

    from enginemesh.v1 import sampling_pb2
    from mesh.manifest import Manifest

WARM_UP_TOKENS = 4
_NO_TOKEN = 2**31 - 1


@dataclass(slots=True)
class _Sequence:
    handle: Any
    wants_logprobs: bool
    given: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sequence that begins when it has room for all of its length."""

    command: engine_process_pb2.AddSequence
    limit: int
    tokens: int


class OpenVinoBackend:
    """One ContinuousBatchingPipeline."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._ended: list[step_pb2.SequenceFinish] = []
        self._speculation: Speculation | None = None
        self._room = Room(0)
        self._waiting: deque[_Waiting] = deque()
        self._leaving: list[int] = []

    @staticmethod
    def versions() -> dict[str, str]:
        """What runs the engine."""
        return installed_versions("openvino", "openvino-genai")

    def load(self, folder: Path, manifest: Manifest) -> EngineLimits:
        """Loads the IR in the profile that the manifest names, exact if it names none.

        Raises:
            ValueError: an option makes no sense.
            RuntimeError: OpenVINO cannot load the engine.
        """
        import openvino_genai

        self._genai = openvino_genai
        self._manifest = manifest
        self._speculation = Speculation.from_options(manifest.options)
        self._room = Room(cache_blocks(manifest))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = manifest.max_batch_size
        scheduler.max_num_batched_tokens = manifest.max_num_tokens
        scheduler.dynamic_split_fuse = self._speculation is None or not self._speculation.has_draft
        scheduler.enable_prefix_caching = True
        scheduler.num_kv_blocks = cache_blocks(manifest)
        properties = plugin_properties(manifest)
        if self._speculation is not None:
            properties |= self._speculation.pipeline_properties(folder, properties)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        return EngineLimits(slots=manifest.max_batch_size, max_seq_len=manifest.max_seq_len)

    def warm_up(self) -> None:
        """A short answer: the first steps compile and allocate."""
        command = engine_process_pb2.AddSequence(prompt_ids=[0] * BLOCK_TOKENS)
        command.sampling.max_tokens = WARM_UP_TOKENS
        command.sampling.temperature = 0
        command.sampling.ignore_eos = True
        self.add(command)
        while self.has_work():
            self.step()

    def add(self, command: engine_process_pb2.AddSequence) -> None:
        """Takes a sequence in, or has `step` say why not."""
        try:
            limit = self._check(command)
        except RefusedSequenceError as error:
            self._ended.append(refused(command.id, str(error)))
            return
        if limit == 0:
            self._ended.append(at_length(command.id))
            return
        if self._speculation is None:
            self._begin(command, limit)
            return
        tokens = len(command.prompt_ids) + limit + self._speculation.extra_tokens
        self._waiting.append(_Waiting(command, limit, tokens))

    def cancel(self, sequence_id: int) -> None:
        """Stops a sequence; the next step frees its blocks."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            sequence.handle.cancel()
            self._leaving.append(sequence_id)
        elif self._waiting:
            self._waiting = deque(one for one in self._waiting if one.command.id != sequence_id)

    def has_work(self) -> bool:
        """Whether the pipeline has unfinished requests, or ends are to be told."""
        is_told = self._ended or self._sequences or self._waiting
        return bool(is_told) or self._pipeline.has_non_finished_requests()

    def step(self) -> step_pb2.StepOutput:
        """One step of the pipeline, and what it gave to each sequence."""
        while self._waiting and self._room.take(self._waiting[0].command.id, self._waiting[0].tokens):
            one = self._waiting.popleft()
            self._begin(one.command, one.limit)
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._free_left()
        builder = StepBuilder()
        for ended in self._ended:
            builder.finish(ended)
        self._ended.clear()
        for sequence_id, sequence in list(self._sequences.items()):
            finish = self._read(sequence_id, sequence, builder)
            if finish is not None:
                builder.finish(finish)
                del self._sequences[sequence_id]
                self._room.give_back(sequence_id)
        return builder.build()

    def stats(self) -> engine_process_pb2.EngineStats:
        """What the pipeline says of its last step."""
        metrics = self._pipeline.get_metrics()
        running = min(metrics.scheduled_requests, len(self._sequences))
        return engine_process_pb2.EngineStats(
            running=running,
            waiting=len(self._sequences) + len(self._waiting) - running,
            kv_cache_usage=metrics.cache_usage / 100,
        )

    def _begin(self, command: engine_process_pb2.AddSequence, limit: int) -> None:
        try:
            handle = self._pipeline.add_request(
                command.id, _tensor(command.prompt_ids), self._config(command.sampling, limit)
            )
        except RuntimeError as error:  # OpenVINO's own checks of the configuration
            self._ended.append(refused(command.id, str(error).partition(" failed at ")[0]))
            self._room.give_back(command.id)
            return
        self._sequences[command.id] = _Sequence(handle, command.sampling.HasField("logprobs"))

    def _free_left(self) -> None:
        """Gives back the room of cancelled sequences, now that the pipeline has dropped them."""
        for sequence_id in self._leaving:
            self._room.give_back(sequence_id)
        self._leaving.clear()

    def _check(self, command: engine_process_pb2.AddSequence) -> int:
        """New tokens that a sequence may get.

        Raises:
            RefusedSequenceError: this engine can never run it.
        """
        if command.sampling.logprobs > 0:
            raise RefusedSequenceError(
                "sampling.logprobs: this engine gives the chosen token's log probability only (0)"
            )
        if (
            self._speculation is not None
            and self._speculation.has_draft
            and _temperature(command.sampling) > 0
        ):
            raise RefusedSequenceError(
                "sampling.temperature: this engine has a draft model and takes the likeliest token only (0)"
            )
        return new_tokens_allowed(
            command,
            max_seq_len=self._manifest.max_seq_len,
            vocab_size=self._manifest.tokenizer.vocab_size,
        )

    def _config(self, sampling: sampling_pb2.SamplingParams, limit: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = limit
        tokenizer = self._manifest.tokenizer
        # A request that ignores the end of sequence still stops at its own stop ids. OpenVINO's
        # `ignore_eos` would ignore those as well, and an unset id is filled in from the model: so every
        # end is a stop id, and the end-of-sequence id is one that no model gives.
        eos_ids = () if sampling.ignore_eos else tokenizer.eos_token_ids
        config.stop_token_ids = {_NO_TOKEN, *eos_ids, *sampling.stop_token_ids}
        config.eos_token_id = _NO_TOKEN
        temperature = _temperature(sampling)
        if temperature > 0:
            config.do_sample = True
            config.temperature = temperature
            config.rng_seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(63)
            if sampling.HasField("top_p"):
                config.top_p = sampling.top_p
            if sampling.HasField("top_k"):
                config.top_k = min(sampling.top_k, tokenizer.vocab_size)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if sampling.HasField(name):
                setattr(config, name, getattr(sampling, name))
        if self._speculation is not None:
            self._speculation.configure(config)
        # OpenVINO counts the chosen token's as one, and gives no others.
        config.logprobs = 1 if sampling.HasField("logprobs") else 0
        return config

    def _read(
        self, sequence_id: int, sequence: _Sequence, builder: StepBuilder
    ) -> step_pb2.SequenceFinish | None:
        """Adds the new tokens of a sequence to the step; returns its end if this was it."""
        ids: list[int] = []
        values: list[float] = []
        finish: step_pb2.SequenceFinish | None = None
        while sequence.handle.can_read():
            for output in sequence.handle.read().values():
                ids += output.generated_ids
                values += output.generated_log_probs
                finish = self._finish(sequence_id, output.finish_reason)
        if ids:
            builder.row(sequence_id, sequence.given, ids, _logprobs(sequence, ids, values))
            sequence.given += len(ids)
        if finish is None and not ids:
            finish = self._unread_end(sequence_id, sequence.handle.get_status())
        return finish

    def _finish(self, sequence_id: int, reason: Any) -> step_pb2.SequenceFinish | None:
        reasons = self._genai.GenerationFinishReason
        if reason == reasons.NONE:
            return None
        return at_length(sequence_id) if reason == reasons.LENGTH else at_stop(sequence_id)

    def _unread_end(self, sequence_id: int, status: Any) -> step_pb2.SequenceFinish | None:
        """The end of a sequence that the pipeline dropped without a word."""
        statuses = self._genai.GenerationStatus
        if status == statuses.RUNNING:
            return None
        if status == statuses.IGNORED:
            return refused(sequence_id, "the sequence does not fit the engine's KV cache")
        return failed(sequence_id, f"the engine ended it with status {status.name}")


def _temperature(sampling: sampling_pb2.SamplingParams) -> float:
    return sampling.temperature if sampling.HasField("temperature") else 1.0


def _tensor(ids: Any) -> Any:
    import numpy as np
    import openvino

    return openvino.Tensor(np.array([ids], dtype=np.int64))


def _logprobs(sequence: _Sequence, ids: list[int], values: list[float]) -> list[inference_pb2.TokenLogprob]:
    if not sequence.wants_logprobs:
        return []
    return [
        inference_pb2.TokenLogprob(token_id=token, logprob=value)
        for token, value in zip(ids, values, strict=True)
    ]
