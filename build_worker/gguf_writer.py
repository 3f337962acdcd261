"""Writes a model as a GGUF file in half precision, one tensor at a time; an adapter is merged on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFWriter

from build_worker.gguf_names import hub_module, to_gguf_order
from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from build_worker.lora import LoraAdapter

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a model: its name in GGUF files, and how it is read, as floats."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Content:
    """A model to be written.

    Attributes:
        heads, kv_heads: Of attention.
        write_metadata: Gives the writer everything but the tensors.
    """

    architecture: str
    heads: int
    kv_heads: int
    tensors: Sequence[Tensor]
    write_metadata: Callable[[GGUFWriter], None]


def write_half_precision(
    path: Path, content: Content, adapter: LoraAdapter | None, on_progress: Callable[[float], None]
) -> None:
    """Writes matrices as F16 and vectors as F32.

    Raises:
        InvalidFieldError: the adapter is not for this model, or a weight is too large for half precision.
    """
    if adapter is not None:
        adapter.require_among(
            module for tensor in content.tensors if (module := _module(tensor)) and len(tensor.shape) > 1
        )
    writer = GGUFWriter(path, content.architecture)
    content.write_metadata(writer)
    for tensor in content.tensors:
        kind = np.dtype(_precision(tensor))
        writer.add_tensor_info(tensor.name, tensor.shape, kind, math.prod(tensor.shape) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = sum(math.prod(tensor.shape) for tensor in content.tensors)
    done = 0
    for tensor in content.tensors:
        writer.write_tensor_data(_written(content, tensor, adapter))
        done += math.prod(tensor.shape)
        on_progress(done / total)
    writer.close()


def _written(content: Content, tensor: Tensor, adapter: LoraAdapter | None) -> np.ndarray[Any, Any]:
    values = tensor.read()
    module = _module(tensor)
    if adapter is not None and module is not None:
        delta = adapter.delta(module, tensor.shape)
        if delta is not None:
            name = tensor.name.removesuffix(_WEIGHT)
            values = values.astype(np.float32)
            values += to_gguf_order(content.architecture, name, delta, content.heads, content.kv_heads)
    with np.errstate(over="ignore"):
        values = values.astype(_precision(tensor))
    if not np.isfinite(values).all():
        raise InvalidFieldError("spec.source", f"{tensor.name} has weights that half precision cannot hold")
    return values


def _module(tensor: Tensor) -> str | None:
    """The hub's name of the module whose weights these are."""
    return hub_module(tensor.name.removesuffix(_WEIGHT)) if tensor.name.endswith(_WEIGHT) else None


def _precision(tensor: Tensor) -> type[np.floating[Any]]:
    return np.float32 if len(tensor.shape) == 1 else np.float16
