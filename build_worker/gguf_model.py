"""Reads a GGUF file: what model it is, its weights in half precision, its tokenizer's parts.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gguf import ReaderTensor

_HALF_OR_SINGLE = (GGMLQuantizationType.F16, GGMLQuantizationType.F32)


class GgufModel:
    """One GGUF file, mapped into memory.

    Raises:
        InvalidFieldError: it is no whole GGUF file, or a part of a split one.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
            raise InvalidFieldError("spec.source", f"not a whole GGUF file: {error}") from error
        if self.get("split.count", 1) > 1:
            raise InvalidFieldError("spec.source", "is one part of a split GGUF file; merge the parts first")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python object."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """A metadata value that the file must have.

        Raises:
            InvalidFieldError: it has not.
        """
        value = self.get(key)
        if value is None:
            raise InvalidFieldError("spec.source", f"the GGUF file has no {key}")
        return value

    @property
    def architecture(self) -> str:
        """Model family, such as "llama"."""
        return str(self.require("general.architecture"))

    def shape(self, name: str, default: Any = None) -> int:
        """A number of the architecture, such as "block_count"; required unless a default is given."""
        key = f"{self.architecture}.{name}"
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int):
            raise InvalidFieldError("spec.source", f"{key} is not one number; such models are not supported")
        return value

    def has_tensor(self, name: str) -> bool:
        """Whether there are weights of this name."""
        return any(tensor.name == name for tensor in self._reader.tensors)

    def write_half_precision(self, path: Path, on_progress: Callable[[float], None]) -> None:
        """Writes the model anew with its matrices as F16 and its vectors as F32, one tensor at a time."""
        writer = GGUFWriter(path, self.architecture)
        self._copy_metadata(writer)
        tensors = self._reader.tensors
        for tensor in tensors:
            shape = [int(size) for size in reversed(tensor.shape)]
            kind = _half_precision(tensor)
            writer.add_tensor_info(
                tensor.name, shape, np.dtype(kind), int(np.prod(shape)) * np.dtype(kind).itemsize
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = sum(int(tensor.n_elements) for tensor in tensors)
        done = 0
        for tensor in tensors:
            writer.write_tensor_data(_weights(tensor).astype(_half_precision(tensor)))
            done += int(tensor.n_elements)
            on_progress(done / total)
        writer.close()

    def _copy_metadata(self, writer: GGUFWriter) -> None:
        for key, field in self._reader.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":  # written by the writer itself
                continue
            if key == "general.file_type":
                writer.add_file_type(LlamaFileType.MOSTLY_F16)
            elif field.types[0] == GGUFValueType.ARRAY:
                writer.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1])
            else:
                writer.add_key_value(key, field.contents(), field.types[0])


def _half_precision(tensor: ReaderTensor) -> type[np.floating[Any]]:
    return np.float32 if len(tensor.shape) == 1 else np.float16


def _weights(tensor: ReaderTensor) -> Any:
    if tensor.tensor_type in _HALF_OR_SINGLE:
        return tensor.data
    return dequantize(tensor.data, tensor.tensor_type)
