"""Kind `vllm`: a checkpoint with what vLLM compiles for it on one target."""

from __future__ import annotations

import logging
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

from build_worker.backends.base import BuildInput, EngineTraits, Report
from build_worker.backends.vllm_checkpoint import write_checkpoint
from build_worker.backends.vllm_start import StartSettings, start
from build_worker.stages import Stage
from mesh import capabilities, sizing
from mesh.errors import BuildError, InvalidFieldError, PreconditionError
from mesh.kinds import KINDS
from mesh.model_shape import read_shape
from mesh.tokenizer_files import TOKENIZER, describe_tokenizer
from mesh.versions import installed_versions, vllm_versions
from mesh.vllm_core import ADAPTER, CHECKPOINT, DRAFT, pack_cache, restore_cache

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.model_file import ModelFile
    from mesh.model_shape import ModelShape

RECIPE = "1"
"""Changed whenever the same input would give another engine than before."""

KIND = KINDS["vllm"]
DEFAULT_BATCH_SIZE = 256
DEFAULT_NUM_TOKENS = 8192
DEFAULT_SPECULATED = 4
DEFAULT_NGRAM_SIZE = 3
_DRAFT_FIELD = "speculation.source"
_ADAPTER_FIELD = "lora[0].source"
log = logging.getLogger(__name__)


class VllmBuilder:
    """Builds engines for vLLM 0.26; docs/gpu.md says what they hold.

    Each is started twice: once to compile, then as it will be published, from a fresh folder. If anything is
    compiled again then, workers would compile it at every start, and the build fails.
    """

    def validate(self, spec: ModelFile) -> None:
        """See Builder."""
        spec.check()
        for module in ("vllm", "torch", "safetensors"):
            if find_spec(module) is None:
                raise PreconditionError(
                    "NOT_INSTALLED",
                    "enginemesh[vllm]",
                    f"this build worker has no {module}: install the extra `vllm`",
                )

    def runtime_versions(self) -> dict[str, str]:
        """See Builder."""
        return vllm_versions()

    def tool_versions(self) -> dict[str, str]:
        """See Builder."""
        return {**vllm_versions(), **installed_versions("safetensors"), "recipe": RECIPE}

    def build(self, job: BuildInput, report: Report) -> EngineTraits:
        """See Builder."""
        precision = job.spec.precision or KIND.default_precision
        report(Stage.CONVERT, 0.0, "reading the source")
        tokenizer = describe_tokenizer(job.source, "spec.source", job.spec.chat_template)
        traits = _traits(
            job.spec, precision, read_shape(job.source), EngineTraits(precision, 1, 1, 1, tokenizer)
        )
        write_checkpoint(job.source, _folder(job.output, CHECKPOINT), precision, "spec.source", report)
        shutil.copyfile(job.source / TOKENIZER, job.output / TOKENIZER)
        if _DRAFT_FIELD in job.more_sources:
            draft_precision = (job.spec.speculation and job.spec.speculation.precision) or "bf16"
            draft = job.more_sources[_DRAFT_FIELD]
            write_checkpoint(
                draft, _folder(job.output, DRAFT), draft_precision, f"spec.{_DRAFT_FIELD}", report
            )
        if _ADAPTER_FIELD in job.more_sources:
            _copy_adapter(job.more_sources[_ADAPTER_FIELD], _folder(job.output, ADAPTER))
        _compile(job, traits, report)
        return traits


def _traits(spec: ModelFile, precision: str, shape: ModelShape, known: EngineTraits) -> EngineTraits:
    if spec.max_seq_len > shape.context_length:
        raise InvalidFieldError(
            "spec.max_seq_len",
            f"{spec.max_seq_len} is more than the model's context of {shape.context_length} tokens",
            limit=shape.context_length,
        )
    max_seq_len = spec.max_seq_len or shape.context_length
    options = _options(spec)
    batch_size = spec.max_batch_size or DEFAULT_BATCH_SIZE
    num_tokens = spec.max_num_tokens or DEFAULT_NUM_TOKENS
    if options.get("enable_chunked_prefill") == "false":
        num_tokens = max(num_tokens, max_seq_len)
    return EngineTraits(
        precision=precision,
        max_batch_size=batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max(num_tokens, batch_size),
        tokenizer=known.tokenizer,
        kv_bytes_per_token=sizing.kv_bytes_per_token(shape, spec.kv_cache_precision),
        capabilities=_capabilities(options),
        options=options,
    )


def _options(spec: ModelFile) -> dict[str, str]:
    """What its runner must know, as text."""
    options = dict(spec.options)
    if spec.kv_cache_precision:
        options["kv_cache_precision"] = spec.kv_cache_precision
    if spec.lora:
        options["lora"] = spec.lora[0].name
    for name in ("tensor_parallel", "pipeline_parallel"):
        if getattr(spec, name) > 1:
            options[name] = str(getattr(spec, name))
    if spec.speculation is not None:
        options["speculation"] = spec.speculation.method
        options["speculation_tokens"] = str(spec.speculation.tokens or DEFAULT_SPECULATED)
        if spec.speculation.method == "prompt_lookup":
            options["speculation_ngram_size"] = str(spec.speculation.ngram_size or DEFAULT_NGRAM_SIZE)
    return options


def _capabilities(options: dict[str, str]) -> tuple[str, ...]:
    names = [
        *(capabilities.LOGPROBS, capabilities.TOP_LOGPROBS),
        *(capabilities.SEED, capabilities.PENALTIES),
    ]
    if options.get("enable_prefix_caching", "true") == "true":
        names.append(capabilities.PREFIX_CACHING)
    if options.get("batch_invariant") == "true":
        names.append(capabilities.REPRODUCIBLE)
    return tuple(sorted(names))


def _compile(job: BuildInput, traits: EngineTraits, report: Report) -> None:
    """Fills the cache by a first start, packs it, and proves by a second that nothing is missing in it.

    Raises:
        BuildError: the engine does not start, or the second start compiled something.
    """
    settings = StartSettings(
        traits.precision,
        traits.max_batch_size,
        traits.max_seq_len,
        traits.max_num_tokens,
        dict(traits.options),
    )
    report(Stage.COMPILE, 0.0, "first start: compiling")
    first_start = _folder(job.work, "first")
    first = start(job.output, first_start, settings)
    pack_cache(first_start, job.output)
    shutil.rmtree(first_start)  # else what still refers to it would be found
    report(Stage.COMPILE, 0.6, "second start, from what is published")
    second_start = _folder(job.work, "second")
    restore_cache(job.output, second_start)
    second = start(job.output, second_start, settings)
    log.info("first start %s, second start %s", first, second)
    report(
        Stage.COMPILE,
        1.0,
        f"cold {first.seconds:.1f} s, from the cache {second.seconds:.1f} s, {second.kv_blocks} KV blocks",
    )
    if second.compilations:
        raise BuildError(
            f"the engine compiled {second.compilations} graphs again when it was started from its own cache",
            stage=Stage.COMPILE.value,
        )


def _copy_adapter(source: Path, output: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (source / name).exists():
            raise InvalidFieldError(f"spec.{_ADAPTER_FIELD}", f"the folder has no {name}")
        shutil.copyfile(source / name, output / name)


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path
