"""What each engine kind can do, so that a model file that asks for more is refused when it is read.

The one description of a kind: model files, the JSON schema and the builders go by it.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NO_LIMIT = 1 << 31
MAX_GPUS = 64


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a kind.

    Attributes:
        type: What its text is read as.
        meaning: For people.
        default: What it is if not given, as text; empty: the kind decides.
        low, high: Bounds of a number, both included.
        choices: What a `choice` may be.
    """

    type: Literal["boolean", "integer", "number", "choice", "text"]
    meaning: str
    default: str = ""
    low: float = 0
    high: float = NO_LIMIT
    choices: tuple[str, ...] = ()

    def value(self, text: str) -> bool | float | str:
        """The option's value: bool, int, float or str, as its type says.

        Raises:
            ValueError: says what it must be.
        """
        if self.type == "text":
            return text
        if self.type in ("boolean", "choice"):
            allowed = ("true", "false") if self.type == "boolean" else self.choices
            if text not in allowed:
                raise ValueError(f"must be one of {', '.join(allowed)}, not {text!r}"[:300])
            return text == "true" if self.type == "boolean" else text
        try:
            number = int(text) if self.type == "integer" else float(text)
        except ValueError:
            number = math.nan
        if not self.low <= number <= self.high:
            what = "a whole number" if self.type == "integer" else "a number"
            raise ValueError(f"must be {what} from {self.low:g} to {self.high:.15g}, not {text!r}"[:300])
        return number


@dataclass(frozen=True, slots=True)
class CacheShare:
    """How a kind bounds its KV cache on a GPU.

    Attributes:
        option: Its option that holds a share, 0 to 1.
        is_of_device: Whether that is a share of the whole device for everything, not of what the rest leaves.
    """

    option: str
    is_of_device: bool


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine kind.

    Attributes:
        meaning: For people.
        device: What its engines run on.
        needs_source: Whether a model file must name weights.
        precisions: Of weights, with what they are, the default first.
        calibrated: Those of them that samples are run through the model for.
        kv_cache_precisions: Of the KV cache; without one the kind or the model decides.
        speculation: Methods of speculative decoding.
        max_lora: Adapters in one engine.
        max_tensor_parallel, max_pipeline_parallel: GPUs of one engine.
        steps_need_room: Whether a step must have room for a token of every sequence.
        options: By name.
        cache_share: What its KV cache may take of a GPU; None: all that is left.
    """

    name: str
    meaning: str
    device: Literal["cpu", "gpu", "any"]
    needs_source: bool
    precisions: Mapping[str, str]
    calibrated: frozenset[str] = frozenset()
    kv_cache_precisions: Mapping[str, str] = field(default_factory=dict)
    speculation: tuple[str, ...] = ()
    max_lora: int = 0
    max_tensor_parallel: int = 1
    max_pipeline_parallel: int = 1
    steps_need_room: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    cache_share: CacheShare | None = None

    @property
    def default_precision(self) -> str:
        """What a model file without `precision` gets."""
        return next(iter(self.precisions))


_FAKE = Kind(
    name="fake",
    meaning="scripted tokens at scripted times, for tests and for measuring the mesh",
    device="any",
    needs_source=False,
    precisions={"none": "there are no weights"},
    options={
        "text": Option("text", "what it answers to every prompt, a byte per step; else tokens made up"),
        "step_ms": Option("number", "milliseconds of a step", high=1_000_000),
        "prefill_ms": Option("number", "milliseconds to the first token", high=1_000_000),
        "load_ms": Option("number", "milliseconds until it is loaded", high=1_000_000),
        "load_error": Option("text", "what loading it fails with"),
        "slots": Option("number", "sequences it runs at once; else max_batch_size", high=1_000_000),
        "die_after_tokens": Option("number", "its process dies after so many tokens", high=1_000_000),
        "hang_after_tokens": Option("number", "it hangs after so many tokens", high=1_000_000),
        "helpers": Option("number", "processes of its own", high=1_000_000),
        "convert_ms": Option("number", "milliseconds of this stage of its build", high=1_000_000),
        "quantise_ms": Option("number", "milliseconds of this stage of its build", high=1_000_000),
        "compile_ms": Option("number", "milliseconds of this stage of its build", high=1_000_000),
        "build_helpers": Option("integer", "processes that its build starts and leaves", high=100),
        "build_memory_mib": Option("integer", "memory that its build takes, in MiB", high=100_000),
        "build_disk_mib": Option("integer", "files that its build makes and drops, in MiB", high=100_000),
        "engine_mib": Option("integer", "size of a file of noise in the engine, in MiB", high=100_000),
    },
)

_OPENVINO = Kind(
    name="openvino",
    meaning="OpenVINO GenAI, on CPUs",
    device="cpu",
    needs_source=True,
    precisions={
        "int8": "8 bits a weight, a scale and zero point per channel",
        "int4": "4 bits a weight, a scale and zero point per group",
        "fp16": "half precision",
    },
    kv_cache_precisions={
        "f32": "single precision, which `exact` has unless told otherwise",
        "f16": "half precision: a few answers in a hundred change in company",
        "u8": "8 bits, which `fast` has unless told otherwise",
        "u4": "4 bits",
    },
    speculation=("draft_model", "prompt_lookup"),
    max_lora=1,
    options={
        "profile": Option(
            "choice",
            "exact: the same tokens alone, in a batch and after a move; fast: what is quickest",
            default="exact",
            choices=("exact", "fast"),
        ),
    },
)

_PLUGIN_TYPES = ("auto", "float16", "bfloat16", "float32", "disable")

_TENSORRT_LLM = Kind(
    name="tensorrt_llm",
    meaning="TensorRT-LLM 1.2.1, on NVIDIA GPUs",
    device="gpu",
    needs_source=True,
    precisions={
        "bf16": "as the model was trained",
        "fp16": "half precision",
        "fp8": "8-bit floats, weights and activations; compute capability 8.9 and later",
        "int8_sq": "8-bit integers, weights and activations (SmoothQuant)",
        "int4_awq": "4 bits a weight (AWQ)",
        "w4a8_awq": "4 bits a weight, activations in 8-bit floats (AWQ); compute capability 8.9 and later",
        "nvfp4": "4-bit floats; compute capability 10.0 and later",
    },
    calibrated=frozenset({"fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"}),
    # What an engine's cache holds is settled with its weights; its runtime takes "auto" only.
    kv_cache_precisions={
        "fp8": "8-bit floats, half the memory",
        "int8": "8-bit integers, half the memory",
    },
    # N-gram, MTP, draft-target and EAGLE-3 belong to its PyTorch backend, which runs no engines.
    speculation=("medusa", "eagle", "lookahead"),
    max_lora=64,
    max_tensor_parallel=MAX_GPUS,
    max_pipeline_parallel=MAX_GPUS,
    steps_need_room=True,
    cache_share=CacheShare("free_gpu_memory_fraction", is_of_device=False),
    options={
        "gemm_plugin": Option(
            "choice", "kernels of matrix products", choices=(*_PLUGIN_TYPES, "fp8", "nvfp4")
        ),
        "gpt_attention_plugin": Option("choice", "kernels of attention", "auto", choices=_PLUGIN_TYPES),
        "nccl_plugin": Option("choice", "communication between GPUs", "auto", choices=_PLUGIN_TYPES),
        "lora_plugin": Option("choice", "kernels of adapters", choices=_PLUGIN_TYPES),
        "gemm_swiglu_plugin": Option("choice", "fused gate and up projection", choices=("fp8", "disable")),
        "low_latency_gemm_plugin": Option("choice", "products of small batches", choices=("fp8", "disable")),
        "fp8_rowwise_gemm_plugin": Option("choice", "products with a scale a row", choices=_PLUGIN_TYPES),
        "low_latency_gemm_swiglu_plugin": Option(
            "choice", "fused gate and up projection of small batches", choices=("fp8", "disable")
        ),
        "gemm_allreduce_plugin": Option(
            "choice", "matrix product and all-reduce in one", choices=("float16", "bfloat16", "disable")
        ),
        "moe_plugin": Option("choice", "kernels of experts", "auto", choices=_PLUGIN_TYPES),
        "context_fmha": Option("boolean", "fused attention of prompts", "true"),
        "use_paged_context_fmha": Option("boolean", "attention of prompts over the paged cache", "true"),
        "use_fp8_context_fmha": Option("boolean", "attention of prompts in FP8", "true"),
        "use_fused_mlp": Option("boolean", "fused gate and up projection", "true"),
        "reduce_fusion": Option("boolean", "fuse all-reduce with what follows it", "false"),
        "norm_quant_fusion": Option("boolean", "fuse RMSNorm with the quantisation after it", "false"),
        "fuse_fp4_quant": Option("boolean", "fuse attention with the FP4 quantisation after it", "false"),
        "pp_reduce_scatter": Option("boolean", "less traffic between stages; Mixtral only", "false"),
        "user_buffer": Option("boolean", "all-reduce without copies", "false"),
        "multiple_profiles": Option("boolean", "an optimisation profile for each range of sizes", "false"),
        "tokens_per_block": Option("integer", "tokens of a block of the KV cache", "32", low=1, high=1024),
        "opt_num_tokens": Option("integer", "tokens per step that kernels are chosen for", low=1),
        "gather_generation_logits": Option("boolean", "keep logits, which log probabilities need", "false"),
        "gather_context_logits": Option("boolean", "keep the logits of prompts", "false"),
        "logits_dtype": Option("choice", "number format of logits", choices=("float16", "float32")),
        "strip_plan": Option("boolean", "no weights in the engine: trtllm-refit puts them in", "false"),
        "weight_sparsity": Option("boolean", "use 2:4 sparsity of the weights", "false"),
        "fast_build": Option("boolean", "build faster; the engine may be slower", "false"),
        "monitor_memory": Option("boolean", "the build's log tells of memory", "false"),
        "profiling_verbosity": Option(
            "choice",
            "what the engine tells profilers",
            "layer_names_only",
            choices=("layer_names_only", "detailed", "none"),
        ),
        "weight_streaming": Option("boolean", "weights may stay in host memory", "false"),
        "max_lora_rank": Option("integer", "largest rank of an adapter", "64", low=1, high=1024),
        "lora_target_modules": Option("text", "modules that adapters change, with spaces between"),
        "dora_plugin": Option("boolean", "adapters may be of the kind DoRA", "false"),
        "lookahead_window": Option("integer", "lookahead: guesses beside each other", "4", low=1, high=64),
        "lookahead_verification": Option("integer", "lookahead: guesses tried a step", "4", low=1, high=64),
        "medusa_choices": Option("text", "medusa: the tree of guesses, JSON lists of whole numbers"),
        "free_gpu_memory_fraction": Option(
            "number", "share of the memory left that the KV cache takes", "0.9", high=1
        ),
        "enable_block_reuse": Option("boolean", "prefixes in the KV cache are shared", "true"),
        "enable_chunked_prefill": Option("boolean", "long prompts are taken in parts", "true"),
        "capacity_scheduler_policy": Option(
            "choice",
            "what happens when the KV cache is full",
            "GUARANTEED_NO_EVICT",
            choices=("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"),
        ),
    },
)

_VLLM = Kind(
    name="vllm",
    meaning="vLLM 0.26, on NVIDIA GPUs: a checkpoint with its compile cache",
    device="gpu",
    needs_source=True,
    precisions={
        "bf16": "as the model was trained",
        "fp16": "half precision",
        "fp8": "8-bit floats; compute capability 8.9 and later",
        "int4_awq": "4 bits a weight (AWQ), as the source has them",
        "nvfp4": "4-bit floats, as the source has them; compute capability 10.0 and later",
    },
    kv_cache_precisions={"bf16": "half precision", "fp8": "8-bit floats, half the memory"},
    speculation=("draft_model", "prompt_lookup", "medusa", "eagle"),
    max_lora=1,
    max_tensor_parallel=MAX_GPUS,
    max_pipeline_parallel=MAX_GPUS,
    steps_need_room=True,
    cache_share=CacheShare("gpu_memory_utilization", is_of_device=True),
    options={
        "gpu_memory_utilization": Option("number", "share of the GPU's memory that it takes", "0.9", high=1),
        "block_size": Option("integer", "tokens of a block of the KV cache", low=1, high=1024),
        "enforce_eager": Option("boolean", "neither compiled code nor CUDA graphs", "false"),
        "enable_prefix_caching": Option("boolean", "prefixes in the KV cache are shared", "true"),
        "enable_chunked_prefill": Option("boolean", "long prompts are taken in parts", "true"),
        "batch_invariant": Option(
            "boolean", "the same tokens alone, in a batch and after a move; slower", "false"
        ),
        "max_lora_rank": Option("integer", "largest rank of an adapter", "16", low=1, high=512),
    },
)

KINDS: Mapping[str, Kind] = MappingProxyType(
    {kind.name: kind for kind in (_OPENVINO, _TENSORRT_LLM, _VLLM, _FAKE)}
)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for who misspelt a name: "did you mean ...? ", or nothing if none is near."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {found[0]}? " if found else ""
