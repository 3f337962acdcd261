"""A LoRA adapter, merged into the weights it changes: W + scale * B @ A.

So the engine is as fast as without. Layout: https://huggingface.co/docs/peft/developer_guides/checkpoint.
Paper: https://arxiv.org/abs/2106.09685; the other scale: https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from build_worker.tensor_files import TensorFiles
from mesh.errors import InvalidFieldError
from mesh.tokenizer_files import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.[A-Za-z0-9_-]+)?\.weight"
)
_NOT_MERGED = ("use_dora", "alpha_pattern", "fan_in_fan_out", "modules_to_save", "trainable_token_indices")
_NO_BIAS = (None, "", "none")


class LoraAdapter:
    """An adapter as PEFT writes it: a folder with adapter_config.json and adapter_model.safetensors.

    Args:
        folder: Where it is.
        field: What errors blame, such as "spec.lora[0].source".

    Raises:
        InvalidFieldError: it is not such a folder, or of a form that cannot be merged.
    """

    def __init__(self, folder: Path, field: str) -> None:
        self._field = field
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise InvalidFieldError(field, f"is no adapter: there is no {name}")
        config = read_json_object(folder / CONFIG, field)
        self._check(config)
        self._alpha = self._number(config, "lora_alpha")
        self._is_rank_stabilised = bool(config.get("use_rslora"))
        self._tensors = TensorFiles([folder / WEIGHTS], field)
        self._pairs = self._find_pairs()

    @property
    def modules(self) -> frozenset[str]:
        """Names of the modules that it changes, such as "model.layers.0.self_attn.q_proj"."""
        return frozenset(self._pairs)

    def delta(self, module: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """What is added to the weights of a module, which have this shape; None if it leaves them.

        Raises:
            InvalidFieldError: the adapter is for a model of other widths.
        """
        if module not in self._pairs:
            return None
        down, up = (self._tensors.read(name) for name in self._pairs[module])
        if (up.shape[0], down.shape[1]) != shape or up.shape[1] != down.shape[0]:
            raise InvalidFieldError(
                self._field,
                f"changes {module} with matrices of {up.shape} and {down.shape}; the model has {shape}",
            )
        rank = down.shape[0]
        scale = self._alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank)
        delta: np.ndarray[Any, np.dtype[np.float32]] = np.float32(scale) * (up @ down)
        return delta

    def require_among(self, modules: Iterable[str]) -> None:
        """Refuses an adapter that changes what the model has not.

        Raises:
            InvalidFieldError: names the first of them.
        """
        missing = sorted(self.modules - set(modules))
        if missing:
            raise InvalidFieldError(self._field, f"changes {missing[0]}, which the model has not as its own")

    def _check(self, config: dict[str, Any]) -> None:
        kind = config.get("peft_type", "LORA")
        if kind != "LORA":
            raise InvalidFieldError(self._field, f"is of type {kind!r}; only LORA can be built in")
        for name in _NOT_MERGED:
            if config.get(name):
                raise InvalidFieldError(self._field, f"{CONFIG} has {name}, which cannot be built in")
        if config.get("bias") not in _NO_BIAS:
            raise InvalidFieldError(
                self._field, f"{CONFIG} has bias {config['bias']!r}; only none is built in"
            )

    def _number(self, config: dict[str, Any], name: str) -> float:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidFieldError(self._field, f"{CONFIG} has no number {name!r}")
        return float(value)

    def _find_pairs(self) -> dict[str, tuple[str, str]]:
        """Module to the names of its two matrices, A and B."""
        found: dict[str, dict[str, str]] = {}
        for name in self._tensors:
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise InvalidFieldError(
                    self._field, f"tensor {name!r} is no part of a LoRA that is known here"
                )
            found.setdefault(match["module"], {})[match["part"]] = name
        for module, parts in found.items():
            if parts.keys() != {"A", "B"} or any(len(self._tensors.shape(n)) != 2 for n in parts.values()):  # noqa: PLR2004 - matrices
                raise InvalidFieldError(self._field, f"{module} has not the two matrices A and B")
        if not found:
            raise InvalidFieldError(self._field, "the adapter changes nothing")
        return {module: (parts["A"], parts["B"]) for module, parts in found.items()}
