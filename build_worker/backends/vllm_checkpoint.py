"""The weights of an engine of kind `vllm`: the source's own, or quantised to FP8 here.

FP8 is compressed-tensors' scheme FP8_DYNAMIC: a scale for each output channel of a weight, activations scaled
token by token as they come. It needs no calibration. Embedding and output matrix stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from build_worker.stages import Stage
from mesh.errors import InvalidFieldError
from mesh.tokenizer_files import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from build_worker.backends.base import Report

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX = "model.safetensors.index.json"
LARGEST_FP8 = 448.0
MATRIX = 2
"""Dimensions of a weight that is one."""

_SMALLEST_SCALE = 1e-12

_QUANTISED = {
    "fp8": ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"),
    "int4_awq": ("awq", "compressed-tensors", "modelopt"),
    "nvfp4": ("compressed-tensors", "modelopt", "modelopt_fp4"),
}
_FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def write_checkpoint(source: Path, output: Path, precision: str, field: str, report: Report) -> None:
    """Fills `output` with what vLLM loads: configuration and safetensors.

    Args:
        source: A folder laid out as on the Hugging Face hub.
        output: An empty folder.
        precision: Of the weights.
        field: What errors blame, such as "spec.source".
        report: Told how far it is.

    Raises:
        InvalidFieldError: the source lacks files, or holds other weights than `precision` says.
    """
    config = read_json_object(source / CONFIG, field)
    shards = sorted(source.glob("*.safetensors"))
    if not config or not shards:
        raise InvalidFieldError(field, f"the folder must hold {CONFIG} and *.safetensors")
    own = config.get("quantization_config") or {}
    method = str(own.get("quant_method", "")) if isinstance(own, dict) else ""
    quantise = _must_quantise(precision, method, field)
    if quantise:
        config["quantization_config"] = _FP8_DYNAMIC
    (output / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True))
    if (source / GENERATION).exists():
        shutil.copyfile(source / GENERATION, output / GENERATION)
    if not quantise:
        for done, path in enumerate([*shards, *source.glob(INDEX)]):
            report(Stage.CONVERT, done / (len(shards) + 1), path.name)
            _link(path, output / path.name)
        return
    places: dict[str, str] = {}
    for done, path in enumerate(shards):
        report(Stage.QUANTISE, done / len(shards), f"weights of {path.name} to fp8")
        places |= dict.fromkeys(_quantise(path, output / path.name), path.name)
    if len(shards) > 1:
        (output / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, sort_keys=True))


def _link(source: Path, output: Path) -> None:
    """A second name where the disk allows it: weights are large, and nobody changes them."""
    try:
        os.link(source.resolve(), output)
    except OSError:
        shutil.copyfile(source, output)


def _must_quantise(precision: str, method: str, field: str) -> bool:
    if precision not in _QUANTISED:
        if method:
            raise InvalidFieldError(field, f"its weights are quantised ({method}), which {precision} is not")
        return False
    if method and method not in _QUANTISED[precision]:
        raise InvalidFieldError(field, f"its weights are quantised by {method}; {precision} is asked for")
    if not method and precision != "fp8":
        known = ", ".join(_QUANTISED[precision])
        raise InvalidFieldError(field, f"{precision} needs weights that are quantised already ({known})")
    return not method


def _quantise(source: Path, output: Path) -> Iterator[str]:
    """Writes one file of tensors; gives the names in it."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors: dict[str, Any] = {}
    with safe_open(str(source), framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            if not _is_matrix_of_a_layer(name, is_matrix=tensor.dim() == MATRIX):
                tensors[name] = tensor
                continue
            weight = tensor.to(device=device, dtype=torch.float32)
            scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=_SMALLEST_SCALE) / LARGEST_FP8
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn).cpu()
            tensors[f"{name}_scale"] = scale.cpu()
    save_file(tensors, str(output), metadata={"format": "pt"})
    yield from tensors


def _is_matrix_of_a_layer(name: str, *, is_matrix: bool) -> bool:
    """Whether it is a weight of what vLLM runs as a quantised linear layer; routers of experts are not."""
    is_router = name.endswith((".gate.weight", ".router.weight"))
    return is_matrix and ".layers." in name and name.endswith(".weight") and not is_router
