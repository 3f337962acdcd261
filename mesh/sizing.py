"""How much memory a model takes: pure functions of its shape. docs/sizing.md explains each formula.

Sizes are in bytes, lengths in tokens. "Per GPU" is the fullest of a group that shares the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mesh.precisions import PRECISIONS

if TYPE_CHECKING:
    from mesh.model_shape import ModelShape

BLOCK_TOKENS = 32
"""Tokens of a block of the paged KV cache, in TensorRT-LLM and OpenVINO; sequences take whole ones."""

CPU_CACHE_BYTES = 1 << 30
"""KV cache of an engine on a CPU, unless one sequence of full length needs more. It grows to this as it is
used, and then keeps the prefixes used last."""

_HALF_BYTES = 2
_LOGIT_BYTES = 4
_ROW_SCALE_BYTES = 3  # OpenVINO's 8-bit weights: a 16-bit scale and an 8-bit zero point per output channel
_GROUP_BITS = 16 + 4  # of its 4-bit weights, per group: a scale and a zero point
_GROUP_SIZES = (128, 64, 32)
_IR_BYTES_PER_LAYER = 90_000  # of the graph in openvino_model.xml
_OPENVINO_TOKENIZER_BYTES = 84  # per token: tokenizer.json, and the tokenizer and detokenizer as graphs
_TOKENIZER_BYTES = 64  # per token: tokenizer.json
_CACHE_SCALE_BYTES = 8  # OpenVINO's quantised KV caches: scale and zero point in single precision

_CACHE_BITS = {"f32": 32, "fp32": 32, "fp8": 8, "int8": 8, "u8": 8, "u4": 4}
_CACHE_BITS_DEFAULT = 16
_SCALED_CACHES = ("u8", "u4")


def weight_bytes(shape: ModelShape, precision: str) -> int:
    """All weights of a model, as an engine holds them."""
    layers = _layer_bytes(shape, precision)
    embeddings = shape.embedding_parameters + shape.output_parameters
    rows = shape.vocab * (1 if shape.is_tied else 2)
    return round(layers + _embedding_bytes(embeddings, rows, precision))


def weight_bytes_per_gpu(
    shape: ModelShape, precision: str, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int:
    """Weights on the fullest GPU: it has its share of a stage's layers, and of an embedding.

    The input embedding is not divided: TensorRT-LLM keeps it whole on each GPU.
    """
    layers = _layer_bytes(shape, precision) * _stage_share(shape, pipeline_parallel) / tensor_parallel
    first = _embedding_bytes(shape.embedding_parameters, shape.vocab, precision)
    last = _embedding_bytes(shape.output_parameters, shape.vocab, precision) / tensor_parallel
    return round(layers + (first + last if pipeline_parallel == 1 else max(first, last)))


def kv_bytes_per_token(
    shape: ModelShape, precision: str = "", tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int:
    """KV cache of one token on one GPU. Heads that are fewer than the GPUs are kept on several."""
    layers = math.ceil(shape.layers / pipeline_parallel)
    heads = math.ceil(shape.kv_heads / tensor_parallel)
    bits = _CACHE_BITS.get(precision, _CACHE_BITS_DEFAULT)
    head = 2 * shape.head_size * bits / 8
    if precision in _SCALED_CACHES:  # keys have scales per channel of a block, values per token
        head += shape.head_size * _CACHE_SCALE_BYTES / BLOCK_TOKENS + _CACHE_SCALE_BYTES
    return round(layers * heads * head)


def activation_bytes(shape: ModelShape, num_tokens: int, batch_size: int, tensor_parallel: int = 1) -> int:
    """What one step needs beside weights and cache: the widest moment of a layer, and the logits."""
    attention = (2 * shape.attention_width + 2 * shape.kv_width) / tensor_parallel
    mlp = (3 if shape.is_gated else 2) * shape.intermediate / tensor_parallel
    layer = num_tokens * (2 * shape.hidden + max(attention, mlp)) * _HALF_BYTES
    return round(layer + batch_size * shape.vocab * _LOGIT_BYTES)


def engine_bytes(shape: ModelShape, precision: str, kind: str) -> int:
    """All files of an engine: weights, graph, tokenizer."""
    weights = weight_bytes(shape, precision)
    if kind == "openvino":
        return weights + shape.layers * _IR_BYTES_PER_LAYER + shape.vocab * _OPENVINO_TOKENIZER_BYTES
    return weights + shape.vocab * _TOKENIZER_BYTES


def sequence_bytes(kv_bytes: int, length: int) -> int:
    """KV cache of one sequence of so many tokens, in whole blocks."""
    return kv_bytes * BLOCK_TOKENS * math.ceil(length / BLOCK_TOKENS)


def _layer_bytes(shape: ModelShape, precision: str) -> float:
    """Matrices and norms of all layers."""
    matrices = shape.matrix_parameters * _matrix_bits(shape, precision) / 8
    if precision == "int8":
        matrices += shape.matrix_rows * _ROW_SCALE_BYTES
    return matrices + shape.norm_parameters * _HALF_BYTES


def _matrix_bits(shape: ModelShape, precision: str) -> float:
    if precision != "int4":
        return PRECISIONS[precision].bits
    widths = (shape.hidden, shape.intermediate)
    group = next((size for size in _GROUP_SIZES if all(width % size == 0 for width in widths)), shape.hidden)
    return 4 + _GROUP_BITS / group


def _embedding_bytes(parameters: int, rows: int, precision: str) -> float:
    """OpenVINO keeps embeddings in 8 bits; engines on GPUs quantise only the matrices of the layers."""
    if precision in ("int8", "int4"):
        return parameters + rows * _ROW_SCALE_BYTES if parameters else 0
    return parameters * (4 if precision == "fp32" else _HALF_BYTES)


def _stage_share(shape: ModelShape, pipeline_parallel: int) -> float:
    return math.ceil(shape.layers / pipeline_parallel) / shape.layers
