"""Kind `tensorrt_llm`: engines of TensorRT-LLM 1.2.1, run by its C++ executor.

The executor's bindings are used, not the LLM class: one call gives what all sequences got, cancelling is
by id, nothing needs an event loop, and no tokeniser is loaded. Batching in flight, paged KV cache, reuse of
blocks and prefill in chunks happen inside it, in threads of its own; so a step here is a wait for its
responses. When its C++ code fails for good it aborts the process, and the worker starts it again.

After a move to another worker, presence and frequency penalties count only what is generated there.
"""

from __future__ import annotations

import atexit
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from enginemesh.internal.v1 import engine_process_pb2, step_pb2
from enginemesh.v1 import inference_pb2
from infer_worker.backends.base import (
    EngineLimits,
    RefusedSequenceError,
    at_length,
    at_stop,
    failed,
    refused,
)
from infer_worker.backends.tensorrt_llm_adapters import Adapters
from infer_worker.backends.tensorrt_llm_config import EngineFiles, executor_config
from infer_worker.backends.tensorrt_llm_request import executor_request, new_tokens
from infer_worker.step_builder import StepBuilder
from mesh.versions import TENSORRT_LLM_TOOLS, installed_versions

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.manifest import Manifest

STEP_WAIT = timedelta(milliseconds=2)
"""Longest wait for responses: what comes from the worker meanwhile waits as long."""

WARM_UP_TOKENS = 4
_MICROSECOND = timedelta(microseconds=1)


@dataclass(slots=True)
class _Sequence:
    id: int
    engine_id: int
    prompt_tokens: int
    wants_logprobs: bool
    given: int = 0


class TensorRtLlmBackend:
    """One executor."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        """By the executor's number."""
        self._engine_ids: dict[int, int] = {}
        self._ended: list[step_pb2.SequenceFinish] = []
        self._first_token_us: list[int] = []
        self._stats = engine_process_pb2.EngineStats()

    @staticmethod
    def versions() -> dict[str, str]:
        """What runs the engine."""
        return installed_versions(*TENSORRT_LLM_TOOLS)

    def load(self, folder: Path, manifest: Manifest) -> EngineLimits:
        """Loads the engine; with several GPUs the executor starts a process for each.

        Raises:
            ValueError: an option makes no sense, or config.json is none of an engine.
            RuntimeError: TensorRT-LLM cannot load the engine.
        """
        from tensorrt_llm.bindings import executor

        self._library = executor
        self._manifest = manifest
        self._files = EngineFiles(folder, manifest)
        self._adapters = Adapters(executor, manifest, folder)
        self._limits = EngineLimits(
            slots=min(manifest.max_batch_size, self._files.max_batch_size),
            max_seq_len=min(manifest.max_seq_len, self._files.max_seq_len),
        )
        self._executor = executor.Executor(
            folder, executor.ModelType.DECODER_ONLY, executor_config(executor, manifest, self._files)
        )
        # Threads of the executor that outlive the interpreter would bring its end down.
        atexit.register(self._executor.shutdown)
        return self._limits

    def warm_up(self) -> None:
        """A short answer: the first steps allocate and choose kernels."""
        command = engine_process_pb2.AddSequence(prompt_ids=[0])
        command.sampling.max_tokens = WARM_UP_TOKENS
        command.sampling.temperature = 0
        command.sampling.ignore_eos = True
        self.add(command)
        while self.has_work():
            for finish in self.step().finishes:
                if finish.error:
                    raise RuntimeError(f"the engine cannot answer: {finish.error}")

    def add(self, command: engine_process_pb2.AddSequence) -> None:
        """Takes a sequence in, or has `step` say why not.

        Raises:
            RuntimeError: the executor has ended; no sequence would ever get an answer.
        """
        try:
            limit = new_tokens(command, self._manifest, self._limits.max_seq_len)
            adapter = self._adapters.config(command.sampling.lora)
        except RefusedSequenceError as error:
            self._ended.append(refused(command.id, str(error)))
            return
        if limit == 0:
            self._ended.append(at_length(command.id))
            return
        if not self._executor.can_enqueue_requests():
            raise RuntimeError("the executor takes no requests any more")
        try:
            request = executor_request(self._library, command, limit, self._manifest, adapter)
            engine_id = self._executor.enqueue_request(request)
        except (RuntimeError, ValueError, TypeError) as error:  # the library's own checks
            self._ended.append(refused(command.id, _first_line(error)))
            return
        wants_logprobs = command.sampling.HasField("logprobs")
        self._sequences[engine_id] = _Sequence(command.id, engine_id, len(command.prompt_ids), wants_logprobs)
        self._engine_ids[command.id] = engine_id

    def cancel(self, sequence_id: int) -> None:
        """Stops a sequence; its last response is of nobody's interest."""
        engine_id = self._engine_ids.pop(sequence_id, None)
        if engine_id is not None:
            del self._sequences[engine_id]
            self._executor.cancel_request(engine_id)

    def has_work(self) -> bool:
        """Whether responses are to come, or ends are to be told."""
        return bool(self._sequences or self._ended)

    def step(self) -> step_pb2.StepOutput:
        """Waits a moment for responses, and gives all that are there: a step's, or of several at once."""
        builder = StepBuilder()
        for finish in self._ended:
            builder.finish(finish)
        self._ended.clear()
        if self._sequences:
            rows: dict[int, list[Any]] = {}
            for response in self._executor.await_responses(timeout=STEP_WAIT):
                rows.setdefault(response.request_id, []).append(response)
            for engine_id, responses in rows.items():
                sequence = self._sequences.get(engine_id)
                if sequence is not None:  # else it was cancelled
                    self._take(sequence, responses, builder)
        return builder.build()

    def stats(self) -> engine_process_pb2.EngineStats:
        """What the executor says of its last step."""
        for record in self._executor.get_latest_iteration_stats()[-1:]:
            self._stats = _stats(json.loads(record.to_json_str()))
        told = engine_process_pb2.EngineStats()
        told.CopyFrom(self._stats)
        if not self._sequences:
            # The last step's figures are from when there still was something to do.
            told.running = told.waiting = 0
            if told.HasField("kv_blocks"):
                told.kv_blocks_used, told.kv_cache_usage, told.batch_size = 0, 0.0, 0
        told.first_token_us.extend(self._first_token_us)
        self._first_token_us.clear()
        return told

    def _take(self, sequence: _Sequence, responses: list[Any], builder: StepBuilder) -> None:
        ids: list[int] = []
        logprobs: list[inference_pb2.TokenLogprob] = []
        finish: step_pb2.SequenceFinish | None = None
        for response in responses:
            if response.has_error():
                finish = failed(sequence.id, _first_line(response.error_msg))
                break
            result = response.result
            new = list(result.output_token_ids[0])
            ids += new
            if sequence.wants_logprobs and new:
                # The library gives those of all tokens so far.
                values = result.log_probs[0][-len(new) :]
                logprobs += [
                    inference_pb2.TokenLogprob(token_id=token, logprob=value)
                    for token, value in zip(new, values, strict=True)
                ]
            if result.is_final:
                finish = self._finish(sequence, result)
                break
        if ids:
            builder.row(sequence.id, sequence.given, ids, logprobs)
            sequence.given += len(ids)
        if finish is not None:
            builder.finish(finish)
            del self._sequences[sequence.engine_id], self._engine_ids[sequence.id]

    def _finish(self, sequence: _Sequence, result: Any) -> step_pb2.SequenceFinish:
        reasons = self._library.FinishReason
        reason = result.finish_reasons[0]
        if reason == reasons.LENGTH:
            finish = at_length(sequence.id)
        elif reason in (reasons.STOP_WORDS, reasons.END_ID):
            finish = at_stop(sequence.id)
        else:
            return failed(sequence.id, f"the engine ended it as {reason.name}")
        metrics = result.request_perf_metrics
        if metrics is not None:
            reused = metrics.kv_cache_metrics.num_reused_blocks * self._files.tokens_per_block
            finish.cached_prompt_tokens = min(reused, sequence.prompt_tokens)
            timing = metrics.timing_metrics
            waited = (timing.first_token_time - timing.arrival_time) // _MICROSECOND
            self._first_token_us.append(max(0, waited))
        return finish


def _stats(record: dict[str, Any]) -> engine_process_pb2.EngineStats:
    """One iteration's statistics; parts that the engine has nothing to say of are null."""
    batch = record.get("inflightBatchingStats") or {}
    cache = record.get("kvCacheStats") or {}
    told = engine_process_pb2.EngineStats(
        running=record.get("numActiveRequests", 0), waiting=record.get("numQueuedRequests", 0)
    )
    if batch:
        told.batch_size = batch["numScheduledRequests"]
    if cache.get("maxNumBlocks"):
        told.kv_blocks, told.kv_blocks_used = cache["maxNumBlocks"], cache["usedNumBlocks"]
        told.kv_cache_usage = cache["usedNumBlocks"] / cache["maxNumBlocks"]
        told.kv_cache_hit_rate = cache.get("cacheHitRate", 0.0)
    return told


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]
