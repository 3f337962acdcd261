"""tensorrt_llm.bindings.executor: the C++ executor."""

from __future__ import annotations

import enum
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from typing_extensions import Self

from tensorrt_llm.contracted import CONTRACT, contracted, enumeration
from tensorrt_llm.made_up import Runtime, Sequence

BatchingType = enumeration("BatchingType")
CapacitySchedulerPolicy = enumeration("CapacitySchedulerPolicy")
CommunicationMode = enumeration("CommunicationMode")
CommunicationType = enumeration("CommunicationType")
ContextChunkingPolicy = enumeration("ContextChunkingPolicy")
FinishReason = enumeration("FinishReason")
ModelType = enumeration("ModelType")

DecodingConfig = contracted("DecodingConfig")
ExecutorConfig = contracted("ExecutorConfig")
GuidedDecodingConfig = contracted("GuidedDecodingConfig")
GuidedDecodingConfig.GuidedDecodingBackend = enum.Enum("GuidedDecodingBackend", ["XGRAMMAR", "LLGUIDANCE"])
GuidedDecodingParams = contracted("executor.GuidedDecodingParams")
GuidedDecodingParams.GuideType = enum.Enum("GuideType", ["JSON", "JSON_SCHEMA", "REGEX", "EBNF_GRAMMAR"])
KvCacheConfig = contracted("executor.KvCacheConfig")
LoraConfig = contracted("LoraConfig")
LookaheadDecodingConfig = contracted("executor.LookaheadDecodingConfig")
OrchestratorConfig = contracted("OrchestratorConfig")
OutputConfig = contracted("OutputConfig")
ParallelConfig = contracted("ParallelConfig")
Request = contracted("Request")
SamplingConfig = contracted("SamplingConfig")
SchedulerConfig = contracted("executor.SchedulerConfig")


class DecodingMode:
    """Static functions, one for each mode."""


for _mode in CONTRACT.classes["DecodingMode"]["attributes"]:
    setattr(DecodingMode, _mode, staticmethod(lambda name=_mode: name))


@dataclass
class RequestPerfMetrics:
    timing_metrics: SimpleNamespace
    kv_cache_metrics: SimpleNamespace
    speculative_decoding: SimpleNamespace | None = None
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None


@dataclass
class Result:
    is_final: bool
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    log_probs: list[list[float]] | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    avg_decoded_tokens_per_iter: float | None = None
    cum_log_probs: list[float] | None = None
    context_logits: object = None
    generation_logits: object = None
    spec_dec_fast_logits_info: object = None
    encoder_output: object = None
    context_phase_params: object = None


@dataclass
class Response:
    request_id: int
    client_id: int | None
    _result: Result | None = None
    _error: str = ""

    def has_error(self) -> bool:
        return bool(self._error)

    @property
    def error_msg(self) -> str:
        if not self._error:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: no error")
        return self._error

    @property
    def result(self) -> Result:
        if self._error:
            raise RuntimeError(f"[TensorRT-LLM][ERROR] {self._error}")
        return self._result


@dataclass
class IterationStats:
    _record: dict = field(default_factory=dict)

    def to_json_str(self) -> str:
        return json.dumps(self._record)


class Executor:
    """One engine."""

    def __init__(
        self, model_path: Path | str, model_type: ModelType, executor_config: ExecutorConfig
    ) -> None:
        if not isinstance(executor_config, ExecutorConfig) or not isinstance(model_type, ModelType):
            raise TypeError("__init__(): incompatible function arguments")
        self._runtime = Runtime(
            Path(model_path),
            max_batch_size=executor_config.max_batch_size or 1 << 30,
            max_num_tokens=executor_config.max_num_tokens or 8192,
            is_chunked=executor_config.enable_chunked_context,
        )
        self._is_guided = executor_config.guided_decoding_config is not None
        self._responses: deque[Response] = deque()
        self._arrived = threading.Condition()

    def can_enqueue_requests(self) -> bool:
        return not self._runtime.is_closed

    def enqueue_request(self, request: Request) -> int:
        if not isinstance(request, Request):
            raise TypeError("enqueue_request(): incompatible function arguments")
        sampling = request.sampling_config
        if not request.input_token_ids or request.max_tokens < 1:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: !inputTokenIds.empty()")
        if sampling.repetition_penalty is not None and sampling.repetition_penalty <= 0:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: repetitionPenalty > 0")
        guide = request.guided_decoding_params
        if guide is not None and not self._is_guided:
            raise RuntimeError("[TensorRT-LLM][ERROR] Request has guided decoding params, but it is disabled")
        changes = "" if guide is None else f"{guide.guide_type.name} {guide.guide}"
        if request.lora_config is not None:
            changes += f"adapter {request.lora_config.task_id}"
        # Without top_k and top_p it takes the likeliest token, and without a seed always seed 0.
        is_greedy = sampling.top_k == 1 or not (sampling.top_k or sampling.top_p)
        stops = request.stop_words or []
        assert all(len(word) == 1 for word in stops), "words of several tokens are not made up here"

        def tell(sequence: Sequence, tokens: list[int], why: str) -> None:
            self._respond(request, sequence, tokens, why)

        return self._runtime.add(
            Sequence(
                prompt=list(request.input_token_ids),
                limit=request.max_tokens,
                tell=tell,
                stops=frozenset(word[0] for word in stops),
                end_id=-1 if request.end_id is None else request.end_id,
                changes=changes,
                seed=None if is_greedy else sampling.seed or 0,
            )
        )

    def enqueue_requests(self, requests: list[Request]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError("await_responses(): incompatible function arguments")
        with self._arrived:
            self._arrived.wait_for(
                lambda: bool(self._responses), None if timeout is None else timeout.total_seconds()
            )
            responses = list(self._responses)
            self._responses.clear()
        return responses

    def get_num_responses_ready(self, id: int | None = None) -> int:  # noqa: A002 - the library's name
        return sum(id in (None, response.request_id) for response in self._responses)

    def cancel_request(self, id: int) -> None:  # noqa: A002 - the library's name
        self._runtime.cancel(id)

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """All since the last call."""
        records = []
        while self._runtime.stats:
            records.append(IterationStats(self._runtime.stats.popleft()))
        return records

    def get_latest_request_stats(self) -> list[object]:
        """None are kept: request_stats_max_iterations is 0 by default."""
        return []

    def get_kv_cache_event_manager(self) -> None:
        """None: event_buffer_max_size is 0 by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        if not self._runtime.is_closed:
            self._runtime.close()

    def _respond(self, request: Request, sequence: Sequence, tokens: list[int], why: str) -> None:
        output = request.output_config
        result = Result(
            is_final=bool(why),
            is_sequence_final=bool(why),
            output_token_ids=[tokens],
            finish_reasons=[FinishReason[why or "NOT_FINISHED"]],
            log_probs=[sequence.logprobs] if output.return_log_probs else None,
            request_perf_metrics=_metrics(sequence) if why and output.return_perf_metrics else None,
        )
        with self._arrived:
            self._responses.append(Response(sequence.id, request.client_id, result))
            self._arrived.notify_all()


def _metrics(sequence: Sequence) -> RequestPerfMetrics:
    return RequestPerfMetrics(
        timing_metrics=SimpleNamespace(
            arrival_time=timedelta(seconds=sequence.arrival),
            first_token_time=timedelta(seconds=sequence.first_token),
        ),
        kv_cache_metrics=SimpleNamespace(num_reused_blocks=sequence.reused_blocks),
    )
