"""From a sequence of the mesh to a request of vLLM's engine core, and from its outputs back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from enginemesh.v1 import inference_pb2

if TYPE_CHECKING:
    from enginemesh.internal.v1 import engine_process_pb2
    from enginemesh.v1 import sampling_pb2
    from mesh.manifest import TokenizerInfo

MAX_LOGPROBS = 20
_SEEDS = 1 << 63
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def core_request(
    command: engine_process_pb2.AddSequence, limit: int, tokenizer: TokenizerInfo, adapter: Any
) -> Any:
    """The vllm.v1.engine.EngineCoreRequest of a sequence.

    Args:
        command: What was asked for.
        limit: New tokens at most.
        tokenizer: Of the engine.
        adapter: A vllm.lora.request.LoRARequest, or None.

    Raises:
        ValueError: vLLM takes no such parameters.
    """
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=str(command.id),
        prompt_token_ids=list(command.prompt_ids),
        mm_features=None,
        sampling_params=_sampling(command.sampling, command.resumed, limit, tokenizer),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
    )


def token_logprobs(token_ids: list[int], lists: Any) -> list[inference_pb2.TokenLogprob]:
    """What vllm.v1.outputs.LogprobsLists says of new tokens: the chosen one's first, then the likeliest."""
    ids, values = lists.logprob_token_ids.tolist(), lists.logprobs.tolist()
    return [
        inference_pb2.TokenLogprob(
            token_id=token,
            logprob=row_values[0],
            top=[
                inference_pb2.TopLogprob(token_id=other, logprob=value)
                for other, value in zip(row_ids[1:], row_values[1:], strict=True)
            ],
        )
        for token, row_ids, row_values in zip(token_ids, ids, values, strict=False)
    ]


def _sampling(wanted: sampling_pb2.SamplingParams, resumed: int, limit: int, tokenizer: TokenizerInfo) -> Any:
    from vllm.sampling_params import SamplingParams

    temperature = wanted.temperature if wanted.HasField("temperature") else 1.0
    # Every end is a stop id, so that a request that ignores the end of sequence still heeds its own.
    eos_ids = () if wanted.ignore_eos else tokenizer.eos_token_ids
    values: dict[str, Any] = {
        "max_tokens": limit,
        "temperature": temperature,
        "stop_token_ids": sorted({*eos_ids, *wanted.stop_token_ids}),
        "ignore_eos": True,
        "detokenize": False,
        "skip_clone": True,
    }
    if temperature > 0:
        # After a move the rest is drawn afresh, but the same way each time.
        seed = wanted.seed + resumed if wanted.HasField("seed") else None
        values["seed"] = seed % _SEEDS if seed is not None else None
        if wanted.HasField("top_p"):
            values["top_p"] = wanted.top_p
        if wanted.HasField("top_k"):
            values["top_k"] = min(wanted.top_k, tokenizer.vocab_size)
    values |= {field.name: value for field, value in wanted.ListFields() if field.name in _PENALTIES}
    if wanted.HasField("logprobs"):
        values["logprobs"] = wanted.logprobs
    return SamplingParams(**values)
