"""Reads a GGUF file: what model it is, its weights, its tokenizer's parts.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, LlamaFileType
from gguf.quants import dequantize

from build_worker.gguf_writer import Content, Tensor
from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGUFWriter, ReaderTensor

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

    @property
    def content(self) -> Content:
        """The whole model, to be written anew."""
        heads = self.shape("attention.head_count")
        return Content(
            architecture=self.architecture,
            heads=heads,
            kv_heads=self.shape("attention.head_count_kv", heads),
            tensors=[_tensor(tensor) for tensor in self._reader.tensors],
            write_metadata=self._copy_metadata,
        )

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


def _tensor(tensor: ReaderTensor) -> Tensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return Tensor(tensor.name, shape, lambda: _weights(tensor))


def _weights(tensor: ReaderTensor) -> Any:
    if tensor.tensor_type in _HALF_OR_SINGLE:
        return tensor.data
    return dequantize(tensor.data, tensor.tensor_type)
