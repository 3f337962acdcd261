"""How an engine of kind `vllm` is started: alike where its caches are filled and where it serves.

vLLM keys its compiled graphs by its whole configuration, by its environment and by the path of the model,
and what it stores names other files of its cache by their paths. So an engine is started in a folder of its
process, where model and cache have relative paths, and with an environment that is the same everywhere. What
was compiled lies in one archive beside the weights: they are one blob for all targets, it belongs to one.
"""

from __future__ import annotations

import json
import os
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

CHECKPOINT = "checkpoint"
DRAFT = "draft"
ADAPTER = "adapter"
CACHE = "compile-cache.tar"

TRY_OUT_PROMPT_TOKENS, TRY_OUT_TOKENS = 32, 4

_CACHE_FOLDER = "cache"
_PARTS = (CHECKPOINT, DRAFT, ADAPTER)

_KEPT = ("VLLM_LOGGING_", "VLLM_HOST_IP", "VLLM_PORT")
"""Of vLLM's variables those that enter no cache key and belong to the host."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_EAGLE_3 = "Eagle3"


class CoreSettings(Protocol):
    """What an engine is started by; a manifest has it, and so has what a builder returns."""

    @property
    def precision(self) -> str:
        """Of the weights."""

    @property
    def max_batch_size(self) -> int:
        """Sequences at once."""

    @property
    def max_seq_len(self) -> int:
        """Tokens of a sequence."""

    @property
    def max_num_tokens(self) -> int:
        """Tokens of a step."""

    @property
    def options(self) -> Mapping[str, str]:
        """Of the kind, and what the builder notes for the runner."""


def engine_arguments(settings: CoreSettings) -> dict[str, Any]:
    """Keyword arguments of vllm.engine.arg_utils.EngineArgs, vLLM 0.26."""
    options = settings.options
    arguments: dict[str, Any] = {
        "model": CHECKPOINT,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # defaults of sampling come with each request
        "dtype": _DTYPES.get(settings.precision, "auto"),
        "max_model_len": settings.max_seq_len,
        "max_num_seqs": settings.max_batch_size,
        "max_num_batched_tokens": settings.max_num_tokens,
        # Graphs of larger batches than the engine takes would only cost start time and memory.
        "max_cudagraph_capture_size": settings.max_batch_size * (1 + _speculated(options)),
        "disable_log_stats": True,
        "kv_cache_dtype": "fp8" if options.get("kv_cache_precision") == "fp8" else "auto",
        "gpu_memory_utilization": float(options.get("gpu_memory_utilization", "0.9")),
        "enforce_eager": options.get("enforce_eager") == "true",
        "enable_prefix_caching": options.get("enable_prefix_caching", "true") == "true",
        "enable_chunked_prefill": options.get("enable_chunked_prefill", "true") == "true",
        "tensor_parallel_size": int(options.get("tensor_parallel", "1")),
        "pipeline_parallel_size": int(options.get("pipeline_parallel", "1")),
    }
    if "block_size" in options:
        arguments["block_size"] = int(options["block_size"])
    if "lora" in options:
        rank = int(options.get("max_lora_rank", "16"))
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if "speculation" in options:
        arguments["speculative_config"] = _speculation(options)
    return arguments


def environment(inherited: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """The variables of an engine's process, made from those that it was started with.

    Args:
        inherited: Others of vLLM's are dropped: they would change what its caches are looked up by.
        options: Of the engine.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("VLLM_") or name.startswith(_KEPT)
    }
    return kept | {
        "VLLM_CACHE_ROOT": f"{_CACHE_FOLDER}/vllm",
        "TRITON_CACHE_DIR": f"{_CACHE_FOLDER}/triton",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ENABLE_STARTUP_PLAN": "1",  # the cache also keeps how much memory the KV blocks may take
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would be compiled by nvcc where it runs
        "VLLM_BATCH_INVARIANT": "1" if options.get("batch_invariant") == "true" else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def set_environment(variables: MutableMapping[str, str], wanted: Mapping[str, str]) -> None:
    """Makes `variables` (a process's own) equal to `wanted`."""
    for name in set(variables) - set(wanted):
        del variables[name]
    variables.update(wanted)


def restore_cache(folder: Path, work: Path) -> None:
    """Unpacks what an engine's builder compiled into the folder that the engine is started in."""
    archive = folder / CACHE
    if archive.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(work / _CACHE_FOLDER, filter="data")


def pack_cache(work: Path, folder: Path) -> None:
    """The inverse: sorted, without times and owners."""
    cache = work / _CACHE_FOLDER
    with tarfile.open(folder / CACHE, "w") as tar:
        for path in sorted(cache.rglob("*")):
            if path.is_file() and not path.name.endswith((".lock", ".tmp")):
                tar.add(path, path.relative_to(cache).as_posix(), recursive=False, filter=_anonymous)


def start_core(folder: Path, settings: CoreSettings, work: Path) -> Any:
    """Loads weights, compiled code and graphs; returns a vllm.v1.engine.core.EngineCore of this process.

    Changes the process's environment, and its working folder to `work`, which is its own.

    Raises:
        Exception: vLLM cannot start the engine.
    """
    for name in _PARTS:
        if (folder / name).exists():
            (work / name).symlink_to((folder / name).resolve())
    set_environment(os.environ, environment(os.environ, settings.options))
    os.chdir(work)
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - seconds, and only engines need it
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - see above
    from vllm.v1.executor import Executor  # noqa: PLC0415 - see above

    config = EngineArgs(**engine_arguments(settings)).create_engine_config()
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def try_out(core: Any) -> None:
    """Two short answers, greedy and sampled: kernels of sampling are loaded with the first of each.

    Raises:
        RuntimeError: a sequence ended otherwise than at its length.
    """
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415 - see start_core
    from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415 - see start_core

    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = SamplingParams(
            temperature=temperature, max_tokens=TRY_OUT_TOKENS, ignore_eos=True, detokenize=False
        )
        request = EngineCoreRequest(
            request_id=f"try-{name}",
            prompt_token_ids=[0] * TRY_OUT_PROMPT_TOKENS,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
        while core.batch_queue or core.scheduler.has_requests():
            outputs, is_executed = core.step_fn()
            core.post_step(is_executed)
            for output in [one for batch in (outputs or {}).values() for one in batch.outputs]:
                if output.finish_reason is not None and str(output.finish_reason) != "length":
                    raise RuntimeError(f"the engine ended a try-out with {output.finish_reason}")
    core.reset_prefix_cache()


def compilations() -> int:
    """Graphs that this process had to compile because no cache held them."""
    from torch._dynamo.utils import counters  # noqa: PLC0415 - see start_core; there is no other
    from vllm.compilation.counter import compilation_counter  # noqa: PLC0415 - see start_core

    return int(counters["inductor"]["fxgraph_cache_miss"] + compilation_counter.num_aot_compiles)


def _speculated(options: Mapping[str, str]) -> int:
    return int(options.get("speculation_tokens", "0"))


def _speculation(options: Mapping[str, str]) -> dict[str, Any]:
    """The speculative_config of vLLM; paths are relative to the engine's folder."""
    method, tokens = options["speculation"], _speculated(options)
    if method == "prompt_lookup":
        longest = int(options["speculation_ngram_size"])
        return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": longest}
    if method == "eagle":
        architectures = json.loads(Path(DRAFT, "config.json").read_text()).get("architectures", [])
        method = "eagle3" if any(_EAGLE_3 in name for name in architectures) else "eagle"
    return {"method": method, "model": DRAFT, "num_speculative_tokens": tokens}


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry
