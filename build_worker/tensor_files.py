"""Reads safetensors: a header of JSON and plain numbers, so nothing in it can run.

Format: https://github.com/huggingface/safetensors#format. Its own library gives bfloat16 to torch only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

HEADER_LIMIT_BYTES = 64 << 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_BFLOAT16 = "BF16"
_TYPES: dict[str, type[np.generic]] = {
    _BFLOAT16: np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    type: str
    shape: tuple[int, ...]
    start: int


class TensorFiles:
    """The tensors of some safetensors files together, read one at a time.

    Args:
        paths: The files.
        field: What errors blame.

    Raises:
        InvalidFieldError: a file is damaged or not of this format, or two hold a tensor of one name.
    """

    def __init__(self, paths: Iterable[Path], field: str) -> None:
        self._field = field
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            for name, entry in self._read_header(path):
                if name in self._entries:
                    raise InvalidFieldError(field, f"there are two tensors {name!r}")
                self._entries[name] = entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A tensor in single precision.

        Raises:
            InvalidFieldError: its numbers are no floats, or some are infinite or none.
        """
        entry = self._entries[name]
        if entry.type not in _TYPES:
            raise InvalidFieldError(
                self._field, f"tensor {name!r} is of type {entry.type}; there are {', '.join(_TYPES)}"
            )
        count = math.prod(entry.shape)
        raw = np.fromfile(entry.path, _TYPES[entry.type], count, offset=entry.start)
        if entry.type == _BFLOAT16:  # the upper half of a single-precision number
            values = (raw.astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.astype(np.float32)
        if not np.isfinite(values).all():
            raise InvalidFieldError(self._field, f"tensor {name!r} holds what is no number")
        return values.reshape(entry.shape)

    def _read_header(self, path: Path) -> Iterator[tuple[str, _Entry]]:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(HEADER_LIMIT_BYTES, size - _LENGTH_BYTES):
                raise InvalidFieldError(self._field, f"{path.name} is not a whole safetensors file")
            data = stream.read(length)
        begin = _LENGTH_BYTES + length
        try:
            header = json.loads(data)
            for name, values in header.items():
                if name != _METADATA:
                    yield name, _entry(path, values, begin, size)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidFieldError(
                self._field, f"{path.name} is not a whole safetensors file: {error}"
            ) from error


def _entry(path: Path, values: dict[str, Any], begin: int, size: int) -> _Entry:
    shape = tuple(int(width) for width in values["shape"])
    first, end = (int(place) for place in values["data_offsets"])
    kind = str(values["dtype"])
    if min((*shape, first), default=0) < 0 or first > end or begin + end > size:
        raise ValueError("a tensor lies outside the file")
    if kind in _TYPES and math.prod(shape) * np.dtype(_TYPES[kind]).itemsize != end - first:
        raise ValueError("a tensor has not the size of its shape")
    return _Entry(path, kind, shape, begin + first)
