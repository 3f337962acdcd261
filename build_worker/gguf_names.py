"""Names and order of weights: those of the Hugging Face hub, and those of GGUF for the same matrix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HUB_LAYER = {gguf: hub for hub, gguf in _LAYER.items()}
_HUB_TOP = {gguf: hub for hub, gguf in _TOP.items()}
_ROTATED = re.compile(r"blk\.[0-9]+\.attn_(?P<what>[qk])")


def gguf_module(hub: str) -> str | None:
    """The name in GGUF files of a module such as "model.layers.0.mlp.up_proj"; None if it has none."""
    if hub in _TOP:
        return _TOP[hub]
    match = re.fullmatch(r"model\.layers\.([0-9]+)\.(.+)", hub)
    if match is None or match[2] not in _LAYER:
        return None
    return f"blk.{match[1]}.{_LAYER[match[2]]}"


def hub_module(gguf: str) -> str | None:
    """The inverse of gguf_module."""
    if gguf in _HUB_TOP:
        return _HUB_TOP[gguf]
    match = re.fullmatch(r"blk\.([0-9]+)\.(.+)", gguf)
    if match is None or match[2] not in _HUB_LAYER:
        return None
    return f"model.layers.{match[1]}.{_HUB_LAYER[match[2]]}"


def to_gguf_order(
    architecture: str, module: str, weights: np.ndarray[Any, Any], heads: int, kv_heads: int
) -> np.ndarray[Any, Any]:
    """The rows of a matrix or bias as GGUF orders them.

    In files of the architecture llama the two halves of each head that a rotation pairs are interleaved, in
    the query and key projections; the hub has one half after the other.
    """
    match = _ROTATED.fullmatch(module)
    if architecture != "llama" or match is None:
        return weights
    count = heads if match["what"] == "q" else kv_heads
    halves = weights.reshape(count, 2, weights.shape[0] // count // 2, *weights.shape[1:])
    interleaved: np.ndarray[Any, Any] = halves.swapaxes(1, 2).reshape(weights.shape)
    return interleaved
