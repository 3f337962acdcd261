"""From a model file to the command line of trtllm-build. Pure; checked against the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.contract import Contract
from mesh.errors import BuildError, InvalidFieldError
from mesh.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.model_file import ModelFile

PROGRAM = "trtllm-build"
KIND = KINDS["tensorrt_llm"]
DEFAULT_BATCH_SIZE = 64
DEFAULT_NUM_TOKENS = 8192
DEFAULT_NGRAM = 3

AT_RUN_TIME = frozenset(
    {
        *("free_gpu_memory_fraction", "enable_block_reuse", "enable_chunked_prefill"),
        *("capacity_scheduler_policy", "medusa_choices", "lookahead_window", "lookahead_verification"),
    }
)
"""Options that whoever runs the engine reads from its manifest. Those of lookahead also decide how many
tokens the engine is built to guess."""

_SWITCHES = frozenset(Contract.load("tensorrt_llm").cli[PROGRAM]["switches"])
_MODES = {"medusa": "medusa", "eagle": "eagle", "lookahead": "lookahead_decoding"}


def check(spec: ModelFile) -> None:
    """Refuses what trtllm-build would, before anything is paid for it.

    Raises:
        InvalidFieldError: names the option.
    """
    options = spec.options
    if options.get("multiple_profiles") == "true" and "opt_num_tokens" in options:
        raise InvalidFieldError("spec.options.opt_num_tokens", "cannot be set along with multiple_profiles")
    if options.get("gather_context_logits") == "true" and spec.speculation is not None:
        raise InvalidFieldError(
            "spec.options.gather_context_logits", f"cannot be had with {spec.speculation.method}"
        )
    if options.get("use_paged_context_fmha", "true") == "true" and options.get("context_fmha") == "false":
        raise InvalidFieldError(
            "spec.options.context_fmha", "use_paged_context_fmha needs it: turn both off, or neither"
        )
    if spec.lora and options.get("lora_plugin") == "disable":
        raise InvalidFieldError("spec.options.lora_plugin", "adapters need it")


def build_flags(spec: ModelFile, max_seq_len: int, draft_len: int, adapters: Sequence[Path]) -> list[str]:
    """What the model file asks for, as options of trtllm-build; folders and caches are the caller's.

    Args:
        spec: The model file.
        max_seq_len: In tokens, the longest sequence.
        draft_len: Tokens guessed ahead; 0 without speculation.
        adapters: Folders of LoRA adapters, in the order of `spec.lora`.
    """
    numbers = {
        "max_batch_size": spec.max_batch_size or DEFAULT_BATCH_SIZE,
        # A request that was moved brings its answer so far as prompt, so a prompt may take all the room.
        "max_input_len": max_seq_len - 1,
        "max_seq_len": max_seq_len,
        "max_beam_width": 1,
        "max_num_tokens": num_tokens(spec),
        "workers": max(1, spec.tensor_parallel) * max(1, spec.pipeline_parallel),
    }
    words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    # What batching in flight rests on.
    words += ["--kv_cache_type", "paged", "--remove_input_padding", "enable"]
    if spec.speculation is not None:
        words += ["--speculative_decoding_mode", _MODES[spec.speculation.method]]
        words += ["--max_draft_len", str(draft_len)]
    if adapters:
        words += ["--lora_dir", *map(str, adapters), "--lora_ckpt_source", "hf"]
        if "lora_plugin" not in spec.options:
            words += ["--lora_plugin", "auto"]
    for name, text in sorted(spec.options.items()):
        if name not in AT_RUN_TIME:
            words += _option(name, text)
    return words


def _option(name: str, text: str) -> list[str]:
    if name in _SWITCHES:
        return [f"--{name}"] if text == "true" else []
    if KIND.options[name].type == "boolean":
        return [f"--{name}", "enable" if text == "true" else "disable"]
    return [f"--{name}", *text.split()]


def num_tokens(spec: ModelFile) -> int:
    """Tokens that one step may take."""
    return spec.max_num_tokens or max(DEFAULT_NUM_TOKENS, spec.max_batch_size)


def lookahead(spec: ModelFile) -> tuple[int, int, int]:
    """Window, n-gram and verification set of lookahead decoding, as the model file asks for."""
    options = KIND.options
    window, verification = (
        int(spec.options.get(name, options[name].default))
        for name in ("lookahead_window", "lookahead_verification")
    )
    ngram = (spec.speculation.ngram_size if spec.speculation else 0) or DEFAULT_NGRAM
    return window, ngram, verification


def lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    """Tokens that lookahead decoding tries in a step at most.

    From TensorRT-LLM's examples/lookahead: a branch for each guess of the window and of the verification set.
    """
    return max(0, ngram - 2) + (window - 1 + verification) * (ngram - 1)


def require_contract(words: Sequence[str]) -> None:
    """Raises BuildError if the contract with this version knows a word of the command line otherwise."""
    problems = Contract.load("tensorrt_llm").flag_problems(PROGRAM, words)
    if problems:
        raise BuildError(f"the command line is not one of TensorRT-LLM 1.2.1: {'; '.join(problems)}")
