"""Kind `openvino`: OpenVINO IR with compressed weights, for CPUs."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

from build_worker.backends.base import BuildInput, EngineTraits, Report
from build_worker.backends.openvino_model import ModelPlan, build_model
from build_worker.backends.openvino_sources import TOKENIZER_IR
from mesh import capabilities, sizing
from mesh.errors import InvalidFieldError, PreconditionError
from mesh.kinds import KINDS
from mesh.plan import cache_precision
from mesh.tokenizer_files import TOKENIZER
from mesh.versions import installed_versions

if TYPE_CHECKING:
    from pathlib import Path

    from build_worker.lora import LoraAdapter
    from mesh.model_file import ModelFile
    from mesh.model_shape import ModelShape

RECIPE = "4"
"""Changed whenever the same input would give another engine than before."""

KIND = KINDS["openvino"]
DRAFT = "draft"
"""Folder of the draft model in the engine."""

DEFAULT_BATCH_SIZE = 64
DEFAULT_NUM_TOKENS = 256
DEFAULT_SPECULATED = 4
DEFAULT_NGRAM_SIZE = 3
_DRAFT_FIELD = "spec.speculation.source"


class OpenVinoBuilder:
    """Builds engines for OpenVINO GenAI; docs/openvino.md says what they can do.

    Option `profile`: `exact` (default) computes so that a sequence's tokens do not depend on what else is
    in the batch; `fast` leaves that to the plugin.
    """

    def validate(self, spec: ModelFile) -> None:
        """See Builder."""
        spec.check()
        _num_tokens(spec, spec.max_batch_size or DEFAULT_BATCH_SIZE, spec.max_seq_len)
        for module in ("openvino_genai", "nncf", "gguf"):
            if find_spec(module) is None:
                raise PreconditionError(
                    "NOT_INSTALLED",
                    "enginemesh[local]",
                    f"this build worker has no {module}: install the extra `local`",
                )

    def runtime_versions(self) -> dict[str, str]:
        """See Builder."""
        return installed_versions("openvino", "openvino-genai")

    def tool_versions(self) -> dict[str, str]:
        """See Builder."""
        tools = installed_versions("nncf", "gguf", "tokenizers", "openvino-tokenizers")
        exporters = installed_versions("optimum-intel", "torch", "transformers")
        return {**self.runtime_versions(), **tools, **exporters, "recipe": RECIPE}

    def build(self, job: BuildInput, report: Report) -> EngineTraits:
        """See Builder."""
        spec = job.spec
        precision = spec.precision or KIND.default_precision
        main = ModelPlan(job.source, "spec.source", precision, _adapter(job), spec.chat_template)
        plans = [main, *_draft_plan(job, precision)]
        shapes = [plan.shape() for plan in plans]
        max_seq_len = _sequence_length(spec, shapes)
        batch_size = spec.max_batch_size or DEFAULT_BATCH_SIZE
        num_tokens = _num_tokens(spec, batch_size, max_seq_len)
        work = _folder(job.work, "model")
        model = build_model(main, work, job.output, report)
        for draft in plans[1:]:
            build_model(draft, _folder(job.work, DRAFT), _folder(job.output, DRAFT), report)
            _share_tokenizer(work, job.output)
        return EngineTraits(
            precision=precision,
            max_batch_size=batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=num_tokens,
            tokenizer=model.tokenizer,
            kv_bytes_per_token=sum(
                sizing.kv_bytes_per_token(shape, cache_precision(spec)) for shape in shapes
            ),
            capabilities=capabilities_of(spec),
            options=_options(spec, model.requirements),
        )


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def _adapter(job: BuildInput) -> LoraAdapter | None:
    from build_worker.lora import LoraAdapter

    if not job.spec.lora:
        return None
    field = "lora[0].source"
    return LoraAdapter(job.more_sources[field], f"spec.{field}")


def _draft_plan(job: BuildInput, precision: str) -> list[ModelPlan]:
    speculation = job.spec.speculation
    if speculation is None or speculation.method != "draft_model":
        return []
    source = job.more_sources["speculation.source"]
    return [ModelPlan(source, _DRAFT_FIELD, speculation.precision or precision)]


def _share_tokenizer(work: Path, output: Path) -> None:
    """Gives both models one tokenizer: OpenVINO loads no pair without, though nothing asks it for text.

    Raises:
        InvalidFieldError: the draft's tokens are not those of the main model.
    """
    from tokenizers import Tokenizer

    own, other = (Tokenizer.from_file(str(folder / TOKENIZER)) for folder in (output, output / DRAFT))
    if own.get_vocab() != other.get_vocab():
        raise InvalidFieldError(_DRAFT_FIELD, "the draft model has other tokens than the model itself")
    (output / DRAFT / TOKENIZER).unlink()
    for name in TOKENIZER_IR:
        if not (output / name).exists():
            if not (work / name).exists():
                raise InvalidFieldError("spec.source", f"with a draft model, the folder must hold {name}")
            shutil.copyfile(work / name, output / name)
        shutil.copyfile(output / name, output / DRAFT / name)


def _sequence_length(spec: ModelFile, shapes: list[ModelShape]) -> int:
    limit = min(shape.context_length for shape in shapes)
    if spec.max_seq_len > limit:
        raise InvalidFieldError(
            "spec.max_seq_len",
            f"{spec.max_seq_len} is more than the model's context of {limit} tokens",
            limit=limit,
        )
    return spec.max_seq_len or limit


def _num_tokens(spec: ModelFile, batch_size: int, max_seq_len: int) -> int:
    """Tokens of a step. With speculation each sequence has several, and a draft takes only whole prompts."""
    speculation = spec.speculation
    if speculation is None:
        return spec.max_num_tokens or DEFAULT_NUM_TOKENS
    needed = batch_size * ((speculation.tokens or DEFAULT_SPECULATED) + 1)
    if speculation.method == "draft_model":
        needed = max(needed, max_seq_len)
    if spec.max_num_tokens and spec.max_num_tokens < needed:
        raise InvalidFieldError(
            "spec.max_num_tokens",
            f"{spec.max_num_tokens} is too few for this speculation, max_batch_size {batch_size} and "
            f"max_seq_len {max_seq_len}: a step needs room for {needed}",
            limit=needed,
        )
    return max(spec.max_num_tokens or DEFAULT_NUM_TOKENS, needed)


def _profile(spec: ModelFile) -> str:
    return spec.options.get("profile", KIND.options["profile"].default)


def capabilities_of(spec: ModelFile) -> tuple[str, ...]:
    """What an engine of this spec can do."""
    names = [capabilities.LOGPROBS, capabilities.PENALTIES, capabilities.PREFIX_CACHING]
    if spec.speculation is not None and spec.speculation.method == "draft_model":
        names.append(capabilities.GREEDY_ONLY)
    else:
        names.append(capabilities.SEED)
    # docs/openvino.md, "Reproducible answers", says what was measured.
    if _profile(spec) == "exact" and cache_precision(spec) == "f32":
        names.append(capabilities.REPRODUCIBLE)
    return tuple(sorted(names))


def _options(spec: ModelFile, requirements: str) -> dict[str, str]:
    """What its runner must know, as text."""
    options = {
        "profile": _profile(spec),
        "kv_cache_precision": cache_precision(spec),
        "runtime_requirements": requirements,
    }
    if spec.lora:
        options["lora"] = spec.lora[0].name
    if spec.speculation is not None:
        options["speculation"] = spec.speculation.method
        options["speculation_tokens"] = str(spec.speculation.tokens or DEFAULT_SPECULATED)
        if spec.speculation.method == "prompt_lookup":
            options["speculation_ngram_size"] = str(spec.speculation.ngram_size or DEFAULT_NGRAM_SIZE)
    return options
