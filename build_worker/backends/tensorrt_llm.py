"""Kind `tensorrt_llm`: engines of TensorRT-LLM 1.2.1; docs/tensorrt-llm.md says what was run for real.

Three resumable parts: quantise (weights to a checkpoint, by nvidia-modelopt), compile (checkpoint to engine
files, by trtllm-build), collect (engine files and tokenizer).
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from build_worker.backends.base import BuildInput, EngineTraits, Part, Report
from build_worker.backends.tensorrt_llm_checkpoint import Checkpoint, make_checkpoint
from build_worker.backends.tensorrt_llm_flags import (
    AT_RUN_TIME,
    KIND,
    build_flags,
    check,
    lookahead,
    lookahead_draft_len,
    num_tokens,
    require_contract,
)
from build_worker.backends.tensorrt_llm_timing import TimingCache
from build_worker.backends.tensorrt_llm_tools import run_build, tool_versions
from build_worker.stages import Stage
from mesh import capabilities, sizing
from mesh.errors import BuildError, InvalidFieldError, PreconditionError
from mesh.model_shape import read_shape
from mesh.nvml import driver_version
from mesh.settings import BuildWorkerSettings
from mesh.tokenizer_files import TOKENIZER, describe_tokenizer, read_json_object
from mesh.versions import TENSORRT_LLM_TOOLS, installed_versions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.model_file import ModelFile
    from mesh.object_store import ObjectStore

RECIPE = "1"
"""Changed whenever the same input would give another engine than before."""

QUANTISE = Part("quantise", Stage.QUANTISE)
COMPILE = Part("compile", Stage.COMPILE)
COLLECT = Part("collect", Stage.COMPILE)
PARTS = (QUANTISE, COMPILE, COLLECT)

CONFIG = "config.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TIMING_IN, TIMING_OUT = "timing-in.cache", "timing-out.cache"


class TensorRtLlmBuilder:
    """Builds engines with nvidia-modelopt and trtllm-build, which the settings name."""

    @cached_property
    def _settings(self) -> BuildWorkerSettings:
        return BuildWorkerSettings()

    @cached_property
    def _python(self) -> str:
        # Programs are started in the build's folder; what is resolved is no environment's Python any more.
        return str((self._settings.modelopt_python or Path(sys.executable)).absolute())

    @cached_property
    def _compiler(self) -> str:
        """The path of trtllm-build; empty if there is none."""
        found = shutil.which(self._settings.trtllm_build)
        return str(Path(found).absolute()) if found else ""

    def validate(self, spec: ModelFile) -> None:
        """See Builder."""
        spec.check()
        check(spec)
        if not self._compiler:
            raise _not_installed(f"no {self._settings.trtllm_build}", "tensorrt-llm 1.2.1")
        if self._settings.modelopt_python is None:
            has_modelopt = find_spec("modelopt") is not None
        else:
            has_modelopt = self._settings.modelopt_python.exists()
        if not has_modelopt:
            raise _not_installed(f"no nvidia-modelopt for {self._python}", "ENGINEMESH_MODELOPT_PYTHON")

    def runtime_versions(self) -> dict[str, str]:
        """See Builder."""
        return installed_versions(*TENSORRT_LLM_TOOLS)

    def tool_versions(self) -> dict[str, str]:
        """See Builder."""
        return {**self.runtime_versions(), **tool_versions(self._python), "recipe": RECIPE}

    def parts(self, spec: ModelFile) -> Sequence[Part]:  # noqa: ARG002 - always the same
        """See ResumableBuilder."""
        return PARTS

    def run_part(self, part: Part, job: BuildInput, result: Path, report: Report) -> None:
        """See ResumableBuilder."""
        if part is QUANTISE:
            make_checkpoint(job, self._python, result, lambda done, what: report(part.stage, done, what))
        elif part is COMPILE:
            self._compile(job, result, report)
        else:
            _collect(job, result)

    def build(self, job: BuildInput, report: Report) -> EngineTraits:
        """See Builder."""
        report(Stage.COMPILE, 1.0, "collecting the files")
        for path in _previous(job).iterdir():
            path.replace(job.output / path.name)
        return _traits(job)

    def _compile(self, job: BuildInput, result: Path, report: Report) -> None:
        spec, checkpoint = job.spec, Checkpoint(_previous(job))
        taken_file, left_file = job.work / TIMING_IN, job.work / TIMING_OUT
        cache = TimingCache(self._objects(), job.target, installed_versions(*TENSORRT_LLM_TOOLS))
        taken = cache.take(taken_file)
        words = [
            *("--checkpoint_dir", str(checkpoint.folder), "--output_dir", str(result)),
            *("--output_timing_cache", str(left_file)),
            *(("--input_timing_cache", str(taken_file)) if taken else ()),
            *build_flags(spec, _sequence_length(job), _draft_len(spec, checkpoint), _adapters(job)),
        ]
        require_contract(words)
        try:
            run_build(
                [self._compiler, *words],
                job.work,
                checkpoint.ranks,
                lambda done, what: report(Stage.COMPILE, done, what),
            )
        finally:
            cache.give_back(left_file, taken)  # what a failed build has measured is worth keeping too
        _require_engines(result, checkpoint.ranks)

    def _objects(self) -> ObjectStore:
        from mesh.object_store import ObjectStore

        return ObjectStore.from_settings(self._settings)


def _not_installed(what: str, subject: str) -> PreconditionError:
    return PreconditionError("NOT_INSTALLED", subject, f"this build worker has {what}: docs/tensorrt-llm.md")


def _previous(job: BuildInput) -> Path:
    if job.previous is None:
        raise BuildError("the part before is missing")
    return job.previous


def _adapters(job: BuildInput) -> list[Path]:
    return [job.more_sources[f"lora[{number}].source"] for number in range(len(job.spec.lora))]


def _sequence_length(job: BuildInput) -> int:
    limit = read_shape(job.source).context_length
    if job.spec.max_seq_len > limit:
        raise InvalidFieldError(
            "spec.max_seq_len",
            f"{job.spec.max_seq_len} is more than the model's context of {limit} tokens",
            limit=limit,
        )
    return job.spec.max_seq_len or limit


def _draft_len(spec: ModelFile, checkpoint: Checkpoint) -> int:
    if spec.speculation is None:
        return 0
    if spec.speculation.method == "lookahead":
        return lookahead_draft_len(*lookahead(spec))
    return spec.speculation.tokens or checkpoint.draft_len


def _require_engines(folder: Path, ranks: int) -> None:
    """Raises BuildError unless trtllm-build left what it ought to."""
    missing = [
        name
        for name in (CONFIG, *(f"rank{rank}.engine" for rank in range(ranks)))
        if not (folder / name).is_file()
    ]
    if missing:
        raise BuildError(f"trtllm-build ended well and left no {', '.join(missing)}")


def _collect(job: BuildInput, result: Path) -> None:
    for path in _previous(job).iterdir():
        path.replace(result / path.name)
    for name in TOKENIZER_FILES:  # trtllm-build copies none
        if (job.source / name).exists():
            shutil.copyfile(job.source / name, result / name)


def _traits(job: BuildInput) -> EngineTraits:
    spec = job.spec
    built = read_json_object(job.output / CONFIG, "spec.source").get("build_config", {})
    shape = read_shape(job.source)
    return EngineTraits(
        precision=spec.precision or KIND.default_precision,
        max_batch_size=int(built["max_batch_size"]),
        max_seq_len=int(built["max_seq_len"]),
        max_num_tokens=int(built.get("max_num_tokens") or num_tokens(spec)),
        tokenizer=describe_tokenizer(job.source, "spec.source", spec.chat_template),
        kv_bytes_per_token=sizing.kv_bytes_per_token(
            shape, spec.kv_cache_precision, spec.tensor_parallel or 1, spec.pipeline_parallel or 1
        ),
        capabilities=_capabilities(spec),
        options=_options(spec),
    )


def _capabilities(spec: ModelFile) -> tuple[str, ...]:
    """What an engine of this spec can do. None is reproducible: kernels go by what else is in the batch."""
    found = [capabilities.PENALTIES, capabilities.SEED]
    if spec.options.get("enable_block_reuse", "true") == "true":
        found.append(capabilities.PREFIX_CACHING)
    if spec.options.get("gather_generation_logits") == "true":
        found.append(capabilities.LOGPROBS)
    if spec.speculation is None:
        found.append(capabilities.GUIDED_DECODING)
    found += [capabilities.lora(adapter.name) for adapter in spec.lora]
    return tuple(sorted(found))


def _options(spec: ModelFile) -> dict[str, str]:
    """What config.json leaves out: options of the run, how the engine was made, and with which driver."""
    options = {name: text for name, text in spec.options.items() if name in AT_RUN_TIME}
    options["built_with_driver"] = driver_version()
    options["kv_cache_precision"] = spec.kv_cache_precision
    options["tensor_parallel"] = str(spec.tensor_parallel or 1)
    options["pipeline_parallel"] = str(spec.pipeline_parallel or 1)
    if spec.lora:
        options["lora"] = json.dumps([adapter.name for adapter in spec.lora])
    if spec.speculation is not None:
        options["speculation"] = spec.speculation.method
        if spec.speculation.method == "lookahead":
            names = ("lookahead_window", "lookahead_ngram", "lookahead_verification")
            options |= {name: str(value) for name, value in zip(names, lookahead(spec), strict=True)}
    return {name: text for name, text in options.items() if text}
