"""Hugging Face folder to TensorRT-LLM checkpoint: `python quantise.py TASK.json`.

nvidia-modelopt wants a torch and a transformers that differ from those of the rest, so this file imports
nothing of the mesh and is started with the Python of an environment of its own. It needs no TensorRT-LLM.
Progress goes to standard output, a line `progress <fraction> <what>` each; other lines are the libraries'.

What a format is in ModelOpt: https://nvidia.github.io/Model-Optimizer/guides/_choosing_quant_methods.html
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_tensorrt_llm_checkpoint, get_model_type
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

WEIGHTS: dict[str, Any] = {
    "bf16": None,
    "fp16": None,
    "fp8": mtq.FP8_DEFAULT_CFG,
    "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
    "int4_awq": mtq.INT4_AWQ_CFG,
    "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
}
CACHE_BITS: dict[str, Any] = {"": None, "fp8": (4, 3), "int8": 8}
CACHE = "*[kv]_bmm_quantizer"
TYPES = {"fp16": torch.float16}
CALIBRATED_SHARE = 0.8
PASSES = {"int4_awq": 2, "w4a8_awq": 2}
"""How often ModelOpt runs the samples through the model: AWQ looks for its scales in a second pass."""


def report(fraction: float, what: str) -> None:
    """Tells the build worker how far this is."""
    print(f"progress {fraction:.3f} {what}", flush=True)  # noqa: T201 - read by the build worker


def quantise(task: dict[str, Any]) -> None:
    """Does one task.

    Args:
        task: source and output (folders), precision, kv_cache_precision, data (a text file with one sample
            a line), samples, seq_len (tokens), tensor_parallel and pipeline_parallel.
    """
    torch.manual_seed(0)
    source, precision = Path(task["source"]), task["precision"]
    dtype = TYPES.get(precision, torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "nvfp4" and device == "cpu":
        raise SystemExit("refused: nvfp4 can be made only where there is a CUDA GPU")
    report(0.0, "reading the model")
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).to(device)
    model_type = get_model_type(model)
    if model_type is None:
        raise SystemExit(f"refused: ModelOpt converts no {type(model).__name__}")
    config = quantisation(precision, task["kv_cache_precision"])
    if config is not None:
        samples = list(_samples(source, Path(task["data"]), task["samples"], task["seq_len"]))
        if not samples:
            raise SystemExit("refused: the calibration data has no sample")
        calibration = Calibration(samples, device, PASSES.get(precision, 1))
        mtq.quantize(model, config, calibration.run)
    report(CALIBRATED_SHARE, "writing the checkpoint")
    with torch.inference_mode():
        export_tensorrt_llm_checkpoint(
            model,
            model_type,
            dtype=dtype,
            export_dir=task["output"],
            inference_tensor_parallel=task["tensor_parallel"],
            inference_pipeline_parallel=task["pipeline_parallel"],
        )
    report(1.0, "checkpoint written")


def quantisation(precision: str, cache: str) -> dict[str, Any] | None:
    """ModelOpt's configuration of these formats; None if nothing is quantised."""
    config: dict[str, Any] | None = copy.deepcopy(WEIGHTS[precision])
    bits = CACHE_BITS[cache]
    if bits is None:
        return config
    if config is None:
        config = {"quant_cfg": {"default": {"enable": False}}, "algorithm": "max"}
    config["quant_cfg"][CACHE] = {"num_bits": bits, "axis": None, "enable": True}
    return config


def _samples(source: Path, data: Path, count: int, length: int) -> Iterator[list[int]]:
    """Token ids of the first lines that are not empty."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    with data.open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer.encode(line.strip()).ids[:length]
            if ids:
                yield ids
                count -= 1
            if count == 0:
                return


class Calibration:
    """Runs samples through a model, as often as ModelOpt asks, and tells how far that is."""

    def __init__(self, samples: list[list[int]], device: str, passes: int) -> None:
        self._samples = samples
        self._device = device
        self._total = passes * len(samples)
        self._done = 0

    def run(self, model: Any) -> None:
        """One pass."""
        with torch.inference_mode():
            for ids in self._samples:
                done = min(1.0, self._done / self._total)
                report(CALIBRATED_SHARE * done, f"sample {self._done + 1} of {self._total}")
                model(torch.tensor([ids], device=self._device))
                self._done += 1


if __name__ == "__main__":
    quantise(json.loads(Path(sys.argv[1]).read_text()))
