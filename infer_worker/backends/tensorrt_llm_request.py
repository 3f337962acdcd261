"""A sequence as TensorRT-LLM's executor takes it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from infer_worker.backends.base import RefusedSequenceError, new_tokens_allowed

if TYPE_CHECKING:
    from enginemesh.internal.v1 import engine_process_pb2
    from enginemesh.v1 import sampling_pb2
    from mesh.manifest import Manifest

NO_TOKEN = -1
MAX_TOP_K = 1024
"""The library would cut a larger one down without a word that a client can hear."""
SEEDS = 1 << 64


def new_tokens(command: engine_process_pb2.AddSequence, manifest: Manifest, max_seq_len: int) -> int:
    """New tokens that a sequence may get.

    Raises:
        RefusedSequenceError: this engine can never run it.
    """
    sampling = command.sampling
    if sampling.logprobs > 0:
        raise RefusedSequenceError(
            "sampling.logprobs: this engine gives the chosen token's log probability only (0)"
        )
    if MAX_TOP_K < sampling.top_k < manifest.tokenizer.vocab_size:
        raise RefusedSequenceError(
            f"sampling.top_k: this engine samples among {MAX_TOP_K} tokens at most, or all"
        )
    if sampling.HasField("guided") and command.resumed:
        # The guide would begin anew in the middle of the answer.
        raise RefusedSequenceError("sampling.guided: such an answer cannot go on after a move")
    length = len(command.prompt_ids) - command.resumed
    if manifest.max_input_len is not None and length > manifest.max_input_len:
        raise RefusedSequenceError(
            f"prompt_ids: {length} tokens; this engine takes prompts of {manifest.max_input_len}"
        )
    return new_tokens_allowed(command, max_seq_len=max_seq_len, vocab_size=manifest.tokenizer.vocab_size)


def executor_request(
    executor: Any,
    command: engine_process_pb2.AddSequence,
    limit: int,
    manifest: Manifest,
    adapter: Any = None,
) -> Any:
    """The Request of a sequence. A new one each time: nothing of it is shared with others.

    Args:
        executor: The module tensorrt_llm.bindings.executor.
        command: The sequence.
        limit: New tokens at most.
        manifest: Of the engine.
        adapter: The LoraConfig to answer with, if any.
    """
    sampling = command.sampling
    ends = () if sampling.ignore_eos else manifest.tokenizer.eos_token_ids
    stop_words = [[token] for token in sorted({*ends, *sampling.stop_token_ids})]
    return executor.Request(
        input_token_ids=list(command.prompt_ids),
        max_tokens=limit,
        streaming=True,
        sampling_config=_sampling_config(executor, sampling, command.resumed, manifest.tokenizer.vocab_size),
        output_config=executor.OutputConfig(
            return_log_probs=sampling.HasField("logprobs"),
            exclude_input_from_output=True,
            return_perf_metrics=True,
        ),
        # The token that `end_id` names is left out of the output, and there can be but one of it. A stop
        # word is given out, and gateways look for the token that ended an answer at its end.
        end_id=NO_TOKEN,
        stop_words=stop_words or None,
        client_id=command.id,
        lora_config=adapter,
        guided_decoding_params=_guide(executor, sampling),
    )


def _guide(executor: Any, sampling: sampling_pb2.SamplingParams) -> Any:
    """The form that the answer must have; None for any."""
    if not sampling.HasField("guided"):
        return None
    types = executor.GuidedDecodingParams.GuideType
    guided = sampling.guided
    if guided.json_schema:
        kind, guide = types.JSON_SCHEMA, guided.json_schema
    elif guided.regex:
        kind, guide = types.REGEX, guided.regex
    elif guided.grammar:
        kind, guide = types.EBNF_GRAMMAR, guided.grammar
    else:
        kind, guide = types.JSON, None
    return executor.GuidedDecodingParams(guide_type=kind, guide=guide)


def _sampling_config(
    executor: Any, sampling: sampling_pb2.SamplingParams, resumed: int, vocab_size: int
) -> Any:
    arguments: dict[str, Any] = {"beam_width": 1}
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if temperature == 0:
        arguments["top_k"] = 1
    else:
        is_limited = sampling.HasField("top_k") and sampling.top_k < vocab_size
        # With neither set the library would take the likeliest token, and with no seed always the same one.
        arguments["top_k"] = sampling.top_k if is_limited else 0
        arguments["top_p"] = sampling.top_p if sampling.HasField("top_p") else 1.0
        arguments["temperature"] = temperature
        # After a move the rest is drawn afresh, but the same way each time.
        seed = sampling.seed + resumed if sampling.HasField("seed") else secrets.randbelow(SEEDS)
        arguments["seed"] = seed % SEEDS
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if sampling.HasField(name):
            arguments[name] = getattr(sampling, name)
    return executor.SamplingConfig(**arguments)
