"""Kind `vllm`: vLLM's engine core, stepped in this process without its front.

Token ids go in and come out; there is no tokenizer, and the outputs of a step are taken together rather than
through a generator for each request. vLLM schedules a step while the GPU still computes the one before, so
what a step gave is published while the next one runs.

After a move to another worker, presence and frequency penalties count only what is generated there: vLLM
takes what it is given for prompt. The repetition penalty, which also counts the prompt, goes on as before.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginemesh.internal.v1 import engine_process_pb2, step_pb2
from infer_worker.backends.base import (
    EngineLimits,
    RefusedSequenceError,
    at_length,
    at_stop,
    failed,
    new_tokens_allowed,
    refused,
)
from infer_worker.backends.vllm_request import MAX_LOGPROBS, core_request, token_logprobs
from infer_worker.step_builder import StepBuilder
from mesh import vllm_core
from mesh.versions import vllm_versions

if TYPE_CHECKING:
    from mesh.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sequence:
    came: float
    wants_logprobs: bool
    given: int = 0
    cached: int | None = None


class VllmBackend:
    """One EngineCore."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}
        self._ended: list[step_pb2.SequenceFinish] = []
        self._first_token_us: list[int] = []
        self._prompt_tokens = self._cached_tokens = self._batch_size = 0
        self._adapter: Any = None

    @staticmethod
    def versions() -> dict[str, str]:
        """What runs the engine, and what its compiled code depends on."""
        return vllm_versions()

    def load(self, folder: Path, manifest: Manifest) -> EngineLimits:
        """Restores the compile cache and starts the core.

        Raises:
            Exception: vLLM cannot start the engine.
        """
        self._manifest = manifest
        self._work = tempfile.TemporaryDirectory(prefix="enginemesh-vllm-")
        began = time.monotonic()
        vllm_core.restore_cache(folder, Path(self._work.name))
        restored = time.monotonic()
        self._core = vllm_core.start_core(folder, manifest, Path(self._work.name))
        log.info(
            "engine core started: cache %.2f s, core %.2f s, graphs compiled: %d",
            restored - began,
            time.monotonic() - restored,
            vllm_core.compilations(),
        )
        if "lora" in manifest.options:
            from vllm.lora.request import LoRARequest

            self._adapter = LoRARequest(manifest.options["lora"], 1, vllm_core.ADAPTER)
            self._core.add_lora(self._adapter)
        return EngineLimits(slots=manifest.max_batch_size, max_seq_len=manifest.max_seq_len)

    def warm_up(self) -> None:
        """Short answers: what the first ones load and allocate is paid for here."""
        vllm_core.try_out(self._core)

    def add(self, command: engine_process_pb2.AddSequence) -> None:
        """Takes a sequence in, or has `step` say why not."""
        try:
            limit = self._check(command)
            if limit == 0:
                self._ended.append(at_length(command.id))
                return
            asked = core_request(command, limit, self._manifest.tokenizer, self._adapter)
            self._core.add_request(*self._core.preprocess_add_request(asked))
        except (RefusedSequenceError, ValueError) as error:
            self._ended.append(refused(command.id, str(error)))
            return
        wants_logprobs = command.sampling.HasField("logprobs")
        self._sequences[asked.request_id] = _Sequence(time.monotonic(), wants_logprobs)

    def cancel(self, sequence_id: int) -> None:
        """Stops a sequence; its blocks are free at once."""
        if self._sequences.pop(str(sequence_id), None) is not None:
            self._core.abort_requests([str(sequence_id)])

    def has_work(self) -> bool:
        """Whether the core has requests or a step in flight, or ends are to be told."""
        core = self._core
        return bool(self._ended or core.batch_queue) or core.scheduler.has_requests()

    def step(self) -> step_pb2.StepOutput:
        """One step of the core, and what it gave to each sequence. The first only fills its pipeline."""
        builder = StepBuilder()
        for ended in self._ended:
            builder.finish(ended)
        self._ended.clear()
        core = self._core
        if core.batch_queue or core.scheduler.has_requests():
            outputs, is_executed = core.step_fn()
            core.post_step(is_executed)
            for one in (outputs or {}).values():
                self._batch_size = len(one.outputs) or self._batch_size
                for output in one.outputs:
                    self._read(output, builder)
        return builder.build()

    def stats(self) -> engine_process_pb2.EngineStats:
        """What the core's scheduler holds."""
        scheduler = self._core.scheduler
        running, waiting = scheduler.get_request_counts()
        usage = scheduler.kv_cache_manager.usage
        blocks = self._core.vllm_config.cache_config.num_gpu_blocks
        stats = engine_process_pb2.EngineStats(
            running=running,
            waiting=waiting,
            kv_cache_usage=usage,
            kv_blocks=blocks,
            kv_blocks_used=round(usage * blocks),
            batch_size=self._batch_size,
            first_token_us=self._first_token_us,
        )
        if self._prompt_tokens:
            stats.kv_cache_hit_rate = self._cached_tokens / self._prompt_tokens
        self._first_token_us.clear()
        return stats

    def _check(self, command: engine_process_pb2.AddSequence) -> int:
        """New tokens that a sequence may get.

        Raises:
            RefusedSequenceError: this engine can never run it.
        """
        if command.sampling.logprobs > MAX_LOGPROBS:
            raise RefusedSequenceError(f"sampling.logprobs: this engine gives {MAX_LOGPROBS} at most")
        return new_tokens_allowed(
            command,
            max_seq_len=self._manifest.max_seq_len,
            vocab_size=self._manifest.tokenizer.vocab_size,
        )

    def _read(self, output: Any, builder: StepBuilder) -> None:
        """Adds one vllm.v1.engine.EngineCoreOutput to the step; those of cancelled sequences are dropped."""
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return
        sequence_id, ids = int(output.request_id), output.new_token_ids
        if ids:
            if not sequence.given:
                self._note_first(sequence, output.prefill_stats)
            wanted = sequence.wants_logprobs and output.new_logprobs is not None
            logprobs = token_logprobs(ids, output.new_logprobs) if wanted else ()
            builder.row(sequence_id, sequence.given, ids, logprobs)
            sequence.given += len(ids)
        if output.finish_reason is not None:
            del self._sequences[output.request_id]
            builder.finish(_finish(sequence_id, sequence, str(output.finish_reason)))

    def _note_first(self, sequence: _Sequence, prefill: Any) -> None:
        self._first_token_us.append(int((time.monotonic() - sequence.came) * 1e6))
        if prefill is not None:
            sequence.cached = prefill.num_cached_tokens
            self._prompt_tokens += prefill.num_prompt_tokens
            self._cached_tokens += prefill.num_cached_tokens


def _finish(sequence_id: int, sequence: _Sequence, reason: str) -> step_pb2.SequenceFinish:
    if reason == "stop":
        finish = at_stop(sequence_id)
    elif reason == "length":
        finish = at_length(sequence_id)
    else:
        finish = failed(sequence_id, f"vLLM ended it with {reason}")
    if sequence.cached is not None:
        finish.cached_prompt_tokens = sequence.cached
    return finish
