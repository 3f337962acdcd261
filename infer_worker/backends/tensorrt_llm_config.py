"""How a TensorRT-LLM engine is set up to run: the executor's configuration, from manifest and config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.capabilities import GUIDED_DECODING
from mesh.kinds import KINDS

if TYPE_CHECKING:
    from mesh.manifest import Manifest

STATS_KEPT = 1000
_KIND = KINDS["tensorrt_llm"]


class EngineFiles:
    """What `trtllm-build` wrote beside the engine.

    Raises:
        ValueError: config.json is none of an engine.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.tokenizer = folder / manifest.tokenizer.file
        config = json.loads((folder / "config.json").read_bytes())
        try:
            build, model = config["build_config"], config["pretrained_config"]
            self.world_size = int(model.get("mapping", {}).get("world_size", 1))
            self.max_batch_size = int(build["max_batch_size"])
            self.max_seq_len = int(build["max_seq_len"])
            self.tokens_per_block = int(build.get("plugin_config", {}).get("tokens_per_block", 32))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"config.json describes no engine: {error!r}") from error


def option(manifest: Manifest, name: str) -> Any:
    """The value of an option of the kind; its default if the manifest does not have it.

    Raises:
        ValueError: it makes no sense.
    """
    described = _KIND.options[name]
    return described.value(manifest.options.get(name, described.default))


def executor_config(executor: Any, manifest: Manifest, files: EngineFiles) -> Any:
    """The ExecutorConfig of an engine.

    Args:
        executor: The module tensorrt_llm.bindings.executor.
        manifest: Its options, and how much it takes at once.
        files: What the engine was built for.

    Raises:
        ValueError: an option makes no sense.
    """
    cache = executor.KvCacheConfig(
        enable_block_reuse=option(manifest, "enable_block_reuse"),
        free_gpu_memory_fraction=option(manifest, "free_gpu_memory_fraction"),
    )
    policy = option(manifest, "capacity_scheduler_policy")
    arguments: dict[str, Any] = {
        "max_beam_width": 1,
        "scheduler_config": executor.SchedulerConfig(
            capacity_scheduler_policy=getattr(executor.CapacitySchedulerPolicy, policy)
        ),
        "kv_cache_config": cache,
        "enable_chunked_context": option(manifest, "enable_chunked_prefill"),
        # Log probabilities as they are, not as temperature and penalties leave them.
        "normalize_log_probs": False,
        "iter_stats_max_iterations": STATS_KEPT,
        "batching_type": executor.BatchingType.INFLIGHT,
        # Larger ones than the engine was built for would be cut down with a warning.
        "max_batch_size": min(manifest.max_batch_size, files.max_batch_size),
        "max_num_tokens": manifest.max_num_tokens,
    }
    if files.world_size > 1:
        arguments["parallel_config"] = _orchestrated(executor)
    if GUIDED_DECODING in manifest.capabilities:
        arguments["guided_decoding_config"] = _guided_decoding_config(executor, manifest, files.tokenizer)
    decoding = _decoding_config(executor, manifest)
    if decoding is not None:
        arguments["decoding_config"] = decoding
    return executor.ExecutorConfig(**arguments)


def _orchestrated(executor: Any) -> Any:
    """Several GPUs: the library starts one process of its own for each, and this one only talks to them."""
    program = Path(executor.__file__).parents[1] / "bin" / "executorWorker"
    orchestrator = executor.OrchestratorConfig(is_orchestrator=True, worker_executable_path=str(program))
    return executor.ParallelConfig(
        communication_type=executor.CommunicationType.MPI,
        communication_mode=executor.CommunicationMode.ORCHESTRATOR,
        orchestrator_config=orchestrator,
    )


def _guided_decoding_config(executor: Any, manifest: Manifest, tokenizer: Path) -> Any:
    """XGrammar wants the vocabulary as text, in the order of the ids."""
    from tokenizers import Tokenizer

    text = tokenizer.read_text()
    vocabulary = Tokenizer.from_str(text).get_vocab()
    return executor.GuidedDecodingConfig(
        backend=executor.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR,
        encoded_vocab=sorted(vocabulary, key=vocabulary.__getitem__),
        tokenizer_str=text,
        stop_token_ids=list(manifest.tokenizer.eos_token_ids),
    )


def _decoding_config(executor: Any, manifest: Manifest) -> Any:
    """What speculation needs to be told at run time; the rest is in the engine."""
    options = manifest.options
    if options.get("speculation") == "lookahead":
        window = executor.LookaheadDecodingConfig(
            max_window_size=int(options.get("lookahead_window", "4")),
            max_ngram_size=int(options.get("lookahead_ngram", "3")),
            max_verification_set_size=int(options.get("lookahead_verification", "4")),
        )
        return executor.DecodingConfig(
            decoding_mode=executor.DecodingMode.Lookahead(), lookahead_decoding_config=window
        )
    if options.get("speculation") == "medusa" and "medusa_choices" in options:
        return executor.DecodingConfig(
            decoding_mode=executor.DecodingMode.Medusa(), medusa_choices=json.loads(options["medusa_choices"])
        )
    return None
