"""The first part of a TensorRT-LLM build: from a source model to a TensorRT-LLM checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from build_worker.backends.tensorrt_llm_flags import KIND
from build_worker.backends.tensorrt_llm_tools import run_quantiser
from mesh.errors import BuildError, InvalidFieldError
from mesh.model_fields import BUILTIN_DATA
from mesh.tokenizer_files import TOKENIZER, read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from build_worker.backends.base import BuildInput

CONFIG = "config.json"
BUILTIN = Path(__file__).parents[1] / "modelopt" / "calibration.txt"
DEFAULT_SAMPLES = 512
DEFAULT_SAMPLE_TOKENS = 512

ALGORITHMS = {
    "fp8": "FP8",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "nvfp4": "NVFP4",
}
"""What a checkpoint's config.json calls each precision; the others have none."""

_HEADS = {"medusa": "MedusaForCausalLM", "eagle": "EagleForCausalLM"}
_HEADS_FIELD = "spec.speculation.source"


class Checkpoint:
    """A folder with config.json and a file of weights for each rank.

    Raises:
        InvalidFieldError: it is none; blames `field`.
    """

    def __init__(self, folder: Path, field: str = "spec.source") -> None:
        self.folder = folder
        self._config = read_json_object(folder / CONFIG, field)
        if "architecture" not in self._config or "dtype" not in self._config:
            raise InvalidFieldError(field, f"is no TensorRT-LLM checkpoint: its {CONFIG} is not one's")
        mapping = self._config.get("mapping") or {}
        self.tensor_parallel = int(mapping.get("tp_size", 1))
        self.pipeline_parallel = int(mapping.get("pp_size", 1))
        self.ranks = self.tensor_parallel * self.pipeline_parallel
        missing = [rank for rank in range(self.ranks) if not (folder / f"rank{rank}.safetensors").is_file()]
        if missing:
            raise InvalidFieldError(field, f"the checkpoint has no rank{missing[0]}.safetensors")

    @property
    def architecture(self) -> str:
        """The class of TensorRT-LLM that runs it."""
        return str(self._config["architecture"])

    @property
    def algorithm(self) -> str:
        """How its weights are quantised; empty: not at all."""
        return self._quantisation("quant_algo")

    @property
    def cache_algorithm(self) -> str:
        """How its KV cache is quantised; empty: not at all."""
        return self._quantisation("kv_cache_quant_algo")

    @property
    def draft_len(self) -> int:
        """Tokens that its own heads guess ahead; 0 if it has none."""
        return int(self._config.get("max_draft_len") or 0)

    def _quantisation(self, name: str) -> str:
        section: dict[str, Any] = self._config.get("quantization") or {}
        return str(section.get(name) or "")


def make_checkpoint(
    job: BuildInput, python: str, result: Path, on_progress: Callable[[float, str], None]
) -> None:
    """Fills `result` with the checkpoint that the model file asks for.

    Heads of Medusa and EAGLE are not converted here: `speculation.source` is a checkpoint with them, as
    TensorRT-LLM's own scripts write it.

    Raises:
        InvalidFieldError: that checkpoint is of another form than is asked for.
        BuildError: ModelOpt failed.
    """
    if not (job.source / TOKENIZER).exists():
        raise InvalidFieldError("spec.source", f"the folder has no {TOKENIZER}")
    method = job.spec.speculation.method if job.spec.speculation else ""
    if method in _HEADS:
        on_progress(0.0, f"taking the checkpoint with the heads of {method}")
        _take_over(job, method, result)
        return
    run_quantiser(python, _task(job, result), job.work, on_progress)
    _require(job, Checkpoint(result), "spec.source")


def _task(job: BuildInput, result: Path) -> dict[str, object]:
    """What quantise.py is told."""
    spec, calibration = job.spec, job.spec.calibration
    is_builtin = calibration is None or calibration.data == BUILTIN_DATA
    return {
        "source": str(job.source),
        "output": str(result),
        "precision": spec.precision or KIND.default_precision,
        "kv_cache_precision": spec.kv_cache_precision,
        "data": str(BUILTIN if is_builtin else job.more_sources["calibration.data"]),
        "samples": (calibration.samples if calibration else 0) or DEFAULT_SAMPLES,
        "seq_len": (calibration.seq_len if calibration else 0) or DEFAULT_SAMPLE_TOKENS,
        "tensor_parallel": spec.tensor_parallel or 1,
        "pipeline_parallel": spec.pipeline_parallel or 1,
    }


def _take_over(job: BuildInput, method: str, result: Path) -> None:
    given = Checkpoint(job.more_sources["speculation.source"], _HEADS_FIELD)
    if given.architecture != _HEADS[method]:
        raise InvalidFieldError(
            _HEADS_FIELD, f"is a checkpoint of {given.architecture}; {method} needs {_HEADS[method]}"
        )
    if not job.spec.speculation or not (job.spec.speculation.tokens or given.draft_len):
        raise InvalidFieldError("spec.speculation.tokens", f"must be set: the checkpoint's {CONFIG} has none")
    _require(job, given, _HEADS_FIELD)
    shutil.copytree(given.folder, result, dirs_exist_ok=True)


def _require(job: BuildInput, checkpoint: Checkpoint, field: str) -> None:
    """Refuses a checkpoint that is not of the form that the model file asks for."""
    spec = job.spec
    wanted = {
        "quantisation": ALGORITHMS.get(spec.precision or KIND.default_precision, ""),
        "KV cache": spec.kv_cache_precision.upper(),
        "tensor parallelism": str(spec.tensor_parallel or 1),
        "pipeline parallelism": str(spec.pipeline_parallel or 1),
    }
    found = {
        "quantisation": checkpoint.algorithm,
        "KV cache": checkpoint.cache_algorithm,
        "tensor parallelism": str(checkpoint.tensor_parallel),
        "pipeline parallelism": str(checkpoint.pipeline_parallel),
    }
    for what, value in wanted.items():
        if found[what] != value:
            text = f"the checkpoint's {what} is {found[what] or 'none'}, not {value or 'none'}"
            raise InvalidFieldError(field, text) if field == _HEADS_FIELD else BuildError(text)
