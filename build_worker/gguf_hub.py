"""A Hugging Face style folder of safetensors as the content of a GGUF file, without torch.

OpenVINO GenAI makes its graph from GGUF files only; a file in half precision holds the same weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf import LlamaFileType
from tokenizers import pre_tokenizers

from build_worker.gguf_names import gguf_module, to_gguf_order
from build_worker.gguf_writer import Content, Tensor
from build_worker.tensor_files import TensorFiles
from mesh.errors import InvalidFieldError
from mesh.model_shape import shape_from_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from gguf import GGUFWriter

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of model_type in config.json, which are the architectures of GGUF as well."""

_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3
_END = "<|end|>"
_DEFAULT_EPSILON = 1e-6
_DEFAULT_ROPE_BASE = 10_000.0
_PLAIN_ROPE = (None, "default")
_DERIVED = ".rotary_emb.inv_freq"


def why_not(config: Mapping[str, Any]) -> str:
    """Why the model of a config.json cannot be converted so; empty if it can."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        return f"model_type {family!r} is none of {', '.join(ARCHITECTURES)}"
    if _rope(config).get("rope_type", _rope(config).get("type")) not in _PLAIN_ROPE:
        return "its RoPE is scaled"
    if config.get("hidden_act", "silu") != "silu":
        return f"its activation is {config['hidden_act']!r}"
    if config.get("use_sliding_window"):
        return "its attention has a sliding window"
    if config.get("quantization_config"):
        return "its weights are quantised already"
    return ""


class HubModel:
    """A folder with config.json and safetensors.

    Raises:
        InvalidFieldError: its files are damaged, or its weights are not those of its architecture.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], field: str) -> None:
        self._config = config
        self._field = field
        self._family = str(config["model_type"])
        self._shape = shape_from_config(config)
        self._files = TensorFiles(sorted(folder.glob("*.safetensors")), field)

    @property
    def content(self) -> Content:
        """The whole model, to be written."""
        return Content(
            architecture=self._family,
            heads=self._shape.heads,
            kv_heads=self._shape.kv_heads,
            tensors=self._tensors(),
            write_metadata=self._write_metadata,
        )

    def _tensors(self) -> list[Tensor]:
        tensors = []
        for name in sorted(self._files):
            module, _, kind = name.rpartition(".")
            if name.endswith(_DERIVED) or (module == "lm_head" and self._shape.is_tied):
                continue
            own = gguf_module(module)
            if own is None or kind not in ("weight", "bias"):
                raise InvalidFieldError(self._field, f"tensor {name!r} is none of a {self._family} model")
            tensors.append(self._tensor(name, own, f"{own}.{kind}"))
        wanted = {f"blk.{layer}.attn_q.weight" for layer in range(self._shape.layers)}
        wanted |= {"token_embd.weight", "output_norm.weight"}
        wanted |= set() if self._shape.is_tied else {"output.weight"}
        missing = sorted(wanted - {tensor.name for tensor in tensors})
        if missing:
            raise InvalidFieldError(self._field, f"the folder's safetensors hold no {missing[0]}")
        return tensors

    def _tensor(self, name: str, module: str, full_name: str) -> Tensor:
        def read() -> np.ndarray[Any, Any]:
            values = self._files.read(name)
            return to_gguf_order(self._family, module, values, self._shape.heads, self._shape.kv_heads)

        return Tensor(full_name, self._files.shape(name), read)

    def _write_metadata(self, writer: GGUFWriter) -> None:
        shape, config = self._shape, self._config
        writer.add_file_type(LlamaFileType.MOSTLY_F16)
        writer.add_context_length(shape.context_length)
        writer.add_embedding_length(shape.hidden)
        writer.add_feed_forward_length(shape.intermediate)
        writer.add_block_count(shape.layers)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_size)
        writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", _DEFAULT_EPSILON)))
        base = config.get("rope_theta") or _rope(config).get("rope_theta") or _DEFAULT_ROPE_BASE
        writer.add_rope_freq_base(float(base))
        _write_stand_in_tokenizer(writer)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, dict) else {}


def _write_stand_in_tokenizer(writer: GGUFWriter) -> None:
    """One token per byte. OpenVINO reads no file without a tokenizer, and the mesh never asks it for text."""
    first, second, *others = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [_END, first, second, *others, first + second]  # the reader wants a control token and a merge
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL_TOKEN] + [_NORMAL_TOKEN] * (len(tokens) - 1))
    writer.add_token_merges([f"{first} {second}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
