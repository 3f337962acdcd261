"""Kind `openvino`: OpenVINO IR with compressed weights, for CPUs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from build_worker.backends.base import BuildInput, EngineTraits, Report
from build_worker.backends.openvino_sources import MODEL, ModelFacts, open_source
from build_worker.stages import Stage
from mesh import capabilities
from mesh.errors import BuildError, InvalidFieldError, PreconditionError
from mesh.kinds import KINDS
from mesh.versions import installed_versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mesh.model_file import ModelFile

RECIPE = "1"
"""Changed whenever the same input would give another engine than before."""

KIND = KINDS["openvino"]
DEFAULT_BATCH_SIZE = 64
DEFAULT_NUM_TOKENS = 256
_GROUP_SIZES = (128, 64, 32)
_PER_CHANNEL = -1


class OpenVinoBuilder:
    """Builds engines for OpenVINO GenAI.

    Option `profile`: `exact` (default) computes so that a sequence's tokens do not depend on what else is
    in the batch; `fast` leaves that to the plugin.
    """

    needs_source = True

    def validate(self, spec: ModelFile) -> None:
        """See Builder."""
        spec.check()
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
        precision = job.spec.precision or KIND.default_precision
        source = open_source(job.source)
        facts = source.facts(job.spec.chat_template)
        max_seq_len = _sequence_length(job.spec, facts)
        folder = source.convert(job.work, job.output, report)
        report(Stage.QUANTISE, 0.0, f"weights to {precision}")
        _quantise(folder / MODEL, job.output / MODEL, precision, facts, report)
        report(Stage.COMPILE, 0.0, f"for {job.target.key}")
        requirements = _try_out(job.output / MODEL, facts)
        report(Stage.COMPILE, 0.8, "checking the tokenizer")
        source.check_tokenizer(job.output)
        profile = job.spec.options.get("profile", KIND.options["profile"].default)
        return EngineTraits(
            precision=precision,
            max_batch_size=job.spec.max_batch_size or DEFAULT_BATCH_SIZE,
            max_seq_len=max_seq_len,
            max_num_tokens=job.spec.max_num_tokens or DEFAULT_NUM_TOKENS,
            tokenizer=facts.tokenizer,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            capabilities=_capabilities(profile),
            options={"profile": profile, "runtime_requirements": requirements},
        )


def _sequence_length(spec: ModelFile, facts: ModelFacts) -> int:
    if spec.max_seq_len > facts.context_length:
        raise InvalidFieldError(
            "spec.max_seq_len",
            f"{spec.max_seq_len} is more than the model's context of {facts.context_length} tokens",
            limit=facts.context_length,
        )
    return spec.max_seq_len or facts.context_length


def _capabilities(profile: str) -> tuple[str, ...]:
    names = [
        capabilities.LOGPROBS,
        capabilities.PENALTIES,
        capabilities.PREFIX_CACHING,
        capabilities.SEED,
    ]
    if profile == "exact":
        names.append(capabilities.REPRODUCIBLE)
    return tuple(sorted(names))


def _quantise(source: Path, output: Path, precision: str, facts: ModelFacts, report: Report) -> None:
    import nncf
    import openvino as ov
    from nncf.quantization.algorithms.weight_compression import algorithm

    model = ov.Core().read_model(source)

    def tracked(items: Iterable[Any], *, weights: list[float], **_: object) -> Iterator[Any]:
        done = 0.0
        for item, weight in zip(items, weights, strict=True):
            yield item
            done += weight
            report(Stage.QUANTISE, done / sum(weights), f"weights to {precision}")

    algorithm.track = tracked  # nncf draws a progress bar here and offers no other way to be told
    if precision == "int8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    elif precision == "int4":
        model = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            group_size=_group_size(facts.widths),
            ratio=1.0,
        )
    ov.save_model(model, output, compress_to_fp16=precision == "fp16")


def _group_size(widths: tuple[int, ...]) -> int:
    """The largest group of weights with a scale of its own that divides every matrix."""
    for size in _GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            return size
    return _PER_CHANNEL


def _try_out(path: Path, facts: ModelFacts) -> str:
    """Compiles the model for this CPU and runs one step; returns what a compiled form of it would need.

    Raises:
        BuildError: its logits are not numbers, or fewer than the vocabulary.
    """
    import numpy as np
    import openvino as ov

    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    prompt = np.arange(8, dtype=np.int64)[np.newaxis]
    inputs = {
        "input_ids": prompt,
        "attention_mask": np.ones_like(prompt),
        "position_ids": prompt,
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    taken = {name: inputs[name] for port in compiled.inputs for name in port.names if name in inputs}
    logits = compiled(taken)["logits"]
    if not np.isfinite(logits).all() or logits.shape[-1] < facts.tokenizer.vocab_size:
        raise BuildError("the engine gives no usable logits", stage=Stage.COMPILE.value)
    return str(compiled.get_property("RUNTIME_REQUIREMENTS"))
