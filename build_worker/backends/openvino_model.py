"""One model of an engine of kind `openvino`, main or draft: from its source to IR that was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from build_worker.backends.openvino_sources import MODEL, open_source
from build_worker.stages import Stage
from mesh.errors import BuildError, InvalidFieldError
from mesh.model_shape import read_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from build_worker.backends.base import Report
    from build_worker.lora import LoraAdapter
    from mesh.manifest import TokenizerInfo
    from mesh.model_shape import ModelShape

_GROUP_SIZES = (128, 64, 32)
_PER_CHANNEL = -1


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What one model is made from.

    Attributes:
        source: A GGUF file, or a folder.
        field: What errors blame, such as "spec.source".
        precision: Of its weights.
        adapter: Merged into the weights.
        chat_template: In place of its own, unless empty.
    """

    source: Path
    field: str
    precision: str
    adapter: LoraAdapter | None = None
    chat_template: str = ""

    def shape(self) -> ModelShape:
        """What the source says of its widths.

        Raises:
            InvalidFieldError: it says too little.
        """
        try:
            return read_shape(self.source)
        except InvalidFieldError as error:
            raise InvalidFieldError(self.field, error.description) from error


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """What became of a source; `requirements` are what a compiled form of it would need to run."""

    tokenizer: TokenizerInfo
    requirements: str


def build_model(plan: ModelPlan, work: Path, output: Path, report: Report) -> BuiltModel:
    """Puts IR and tokenizers into `output`.

    Raises:
        MeshError: the source is at fault, or what came of it does not run.
    """
    source = open_source(plan.source, plan.field)
    tokenizer = source.tokenizer(plan.chat_template)
    folder = source.convert(work, output, plan.adapter, report)
    report(Stage.QUANTISE, 0.0, f"weights to {plan.precision}")
    _quantise(folder / MODEL, output / MODEL, plan.precision, plan.shape(), report)
    report(Stage.COMPILE, 0.0, "trying a step")
    requirements = _try_out(output / MODEL, tokenizer.vocab_size)
    report(Stage.COMPILE, 0.8, "checking the tokenizer")
    source.check_tokenizer(output)
    return BuiltModel(tokenizer, requirements)


def _quantise(source: Path, output: Path, precision: str, shape: ModelShape, report: Report) -> None:
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
            group_size=_group_size((shape.hidden, shape.intermediate)),
            ratio=1.0,
        )
    ov.save_model(model, output, compress_to_fp16=precision == "fp16")


def _group_size(widths: tuple[int, ...]) -> int:
    """The largest group of weights with a scale of its own that divides every matrix."""
    for size in _GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            return size
    return _PER_CHANNEL


def _try_out(path: Path, vocab_size: int) -> str:
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
    if not np.isfinite(logits).all() or logits.shape[-1] < vocab_size:
        raise BuildError("the engine gives no usable logits", stage=Stage.COMPILE.value)
    return str(compiled.get_property("RUNTIME_REQUIREMENTS"))
