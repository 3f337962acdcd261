"""LLM over engines; by the same surface the PyTorch backend of later versions is driven."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Self

from tensorrt_llm.contracted import CONTRACT, by_name
from tensorrt_llm.executor.result import IterationResult, RequestOutput
from tensorrt_llm.llmapi import llm_args
from tensorrt_llm.made_up import Runtime, Sequence
from tensorrt_llm.sampling_params import SamplingParams

STATS_TIMEOUT_S = 2.0


class LLM:
    """One engine."""

    def __init__(self, model: str | Path, tokenizer: object = None, **kwargs: object) -> None:
        known = CONTRACT.parameters("TrtLlmArgs")
        for name in kwargs:
            if name not in known:
                raise ValueError(f"TrtLlmArgs got invalid argument: {name}")
        self.args = llm_args.TrtLlmArgs(model=model, tokenizer=tokenizer, **kwargs)
        cache = kwargs.get("kv_cache_config")
        assert cache is None or cache.dtype == "auto", "KvCacheConfig.dtype is not supported by engines"
        self.tokenizer = None
        self.workspace = None
        self.llm_id = "stand-in"
        self._runtime = Runtime(
            Path(model),
            max_batch_size=kwargs.get("max_batch_size") or 1 << 30,
            max_num_tokens=self.args.max_num_tokens,
            is_chunked=self.args.enable_chunked_prefill,
        )

    def generate_async(self, inputs: list[int], *values: object, **named: object) -> RequestOutput:
        parameters = CONTRACT.method_parameters("LLM", "generate_async")
        given = by_name("generate_async", parameters, (inputs, *values), named)
        for name in given:
            if name not in parameters:
                raise TypeError(f"generate_async() got an unexpected keyword argument {name!r}")
        if self._runtime.is_closed:
            raise RuntimeError("LLM is shutting down")
        sampling = given.get("sampling_params") or SamplingParams()
        if sampling.end_id is None:
            if not self.args.skip_tokenizer_init:
                sampling.end_id = 2  # from the tokenizer; the caller's object is changed
            elif not sampling.ignore_eos:
                raise ValueError("end_id must be set when the tokenizer is not initialized")
        if sampling.logprobs is not None and not self.args.gather_generation_logits:
            raise ValueError("logprobs need gather_generation_logits")
        output = RequestOutput(self._runtime, wants_logprobs=sampling.logprobs is not None)
        output.request_id = self._runtime.add(
            Sequence(
                prompt=list(inputs),
                limit=sampling.max_tokens,
                tell=output.tell,
                stops=frozenset(sampling.stop_token_ids or ()),
                end_id=-1 if sampling.ignore_eos else sampling.end_id,
            )
        )
        return output

    def generate(self, *_: object, **__: object) -> None:
        raise NotImplementedError("the mesh streams")

    def get_stats_async(self, timeout: float | None = STATS_TIMEOUT_S) -> IterationResult:
        return IterationResult(self._runtime, timeout or STATS_TIMEOUT_S)

    def get_stats(self, timeout: float | None = STATS_TIMEOUT_S) -> list[dict]:
        return self.get_stats_async(timeout).get_results()

    def get_kv_cache_events(self, timeout: float | None = STATS_TIMEOUT_S) -> list[dict]:
        return []

    def get_kv_cache_events_async(self, timeout: float | None = STATS_TIMEOUT_S) -> IterationResult:
        return IterationResult(self._runtime, 0.0)

    def save(self, engine_dir: str) -> None:
        raise RuntimeError("there is no engine that was built here")

    def shutdown(self) -> None:
        if not self._runtime.is_closed:
            self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
