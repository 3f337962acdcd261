"""Whether a model fits a device, and how: what `enginemesh plan` shows. Pure; docs/sizing.md explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.errors import InvalidFieldError
from mesh.kinds import KINDS
from mesh.precisions import PRECISIONS, supported_precisions
from mesh.sizing import (
    CPU_CACHE_BYTES,
    activation_bytes,
    engine_bytes,
    kv_bytes_per_token,
    sequence_bytes,
    weight_bytes,
    weight_bytes_per_gpu,
)

if TYPE_CHECKING:
    from mesh.model_file import ModelFile
    from mesh.model_shape import ModelShape
    from mesh.target import Target

MIB = 1 << 20
GPU_RESERVED_BYTES = 1300 * MIB
"""Driver, CUDA context and libraries of one process, measured on an H200 with driver 580 and CUDA 13."""

CPU_RESERVED_BYTES = 512 * MIB
NUM_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
"""Tokens of one step: TensorRT-LLM's default, and what is tried if that takes too much."""

ACTIVATION_SHARE = 0.05
CPU_NUM_TOKENS = 256
BATCH_LIMIT = 512
CPU_BATCH_LIMIT = 64
_BATCH_STEP = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model lies in the memory of a device. Sizes are bytes, lengths tokens, times seconds.

    Attributes:
        target: Name of the device.
        memory_bytes: Of one device.
        gpus: Devices that one engine takes; "per GPU" is the fullest of them.
        precision, kv_cache_precision: What was reckoned with; "auto" for a cache whose kind decides.
        weight_bytes: Of the whole model.
        activation_bytes: Per GPU, of a step of `max_num_tokens` tokens.
        reserved_bytes: Per GPU: driver, context and libraries.
        kv_cache_bytes: Per GPU: what is left for the KV cache.
        kv_bytes_per_token: Of the whole model.
        kv_cache_tokens: What the cache holds.
        max_seq_len: Longest sequence.
        sequence_length: Of the sequences that are counted in `sequences`.
        sequences: So many of that length run at once; `full_sequences`: of the greatest length.
        max_num_tokens: Of a step, as the model file says, or else as suggested.
        suggested_max_batch_size, suggested_max_num_tokens: What fits this device.
        engine_bytes: Of all files of the engine.
        fetch_s: To bring them over the network.
        problem: Why weights, a step and one sequence of the greatest length do not fit; empty if they do.
    """

    target: str
    memory_bytes: int
    gpus: int
    precision: str
    kv_cache_precision: str
    weight_bytes: int
    weight_bytes_per_gpu: int
    activation_bytes: int
    reserved_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_per_gpu: int
    kv_cache_tokens: int
    max_seq_len: int
    sequence_length: int
    sequences: int
    full_sequences: int
    max_num_tokens: int
    suggested_max_batch_size: int
    suggested_max_num_tokens: int
    engine_bytes: int
    fetch_s: float
    problem: str

    @property
    def fits(self) -> bool:
        """Whether the engine can run there."""
        return not self.problem


@dataclass(frozen=True, slots=True)
class _Load:
    """What one device holds before its KV cache, and a token of that."""

    weights: int
    activations: int
    reserved: int
    kv_bytes: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.reserved


def make_plan(
    spec: ModelFile, shape: ModelShape, target: Target, bytes_per_s: float, sequence_length: int = 0
) -> Plan:
    """Reckons one model on one device.

    Args:
        spec: What is to be built.
        shape: Of its model.
        target: The device.
        bytes_per_s: Of the network that engines come over.
        sequence_length: Of a usual sequence, prompt and answer; 0: the greatest.

    Raises:
        InvalidFieldError: the kind has no weights to reckon with, or the file's lengths are beyond the
            model's.
    """
    precision, cache = _precision(spec), cache_precision(spec)
    max_seq_len = _sequence_length(spec, shape)
    length = min(sequence_length or max_seq_len, max_seq_len)
    suggested_tokens = _suggested_num_tokens(shape, target, spec.tensor_parallel or 1)
    num_tokens = spec.max_num_tokens or suggested_tokens
    load = _load(spec, shape, target, num_tokens)
    room = _cache_room(spec, target, load, max_seq_len)
    sequences = room // sequence_bytes(load.kv_bytes, length)
    full_sequences = room // sequence_bytes(load.kv_bytes, max_seq_len)
    size = engine_bytes(shape, precision, spec.kind)
    return Plan(
        target=target.name,
        memory_bytes=target.memory_bytes,
        gpus=_gpus(spec),
        precision=precision,
        kv_cache_precision=cache,
        weight_bytes=weight_bytes(shape, precision),
        weight_bytes_per_gpu=load.weights,
        activation_bytes=load.activations,
        reserved_bytes=load.reserved,
        kv_cache_bytes=room,
        kv_bytes_per_token=kv_bytes_per_token(shape, cache),
        kv_bytes_per_token_per_gpu=load.kv_bytes,
        kv_cache_tokens=room // load.kv_bytes,
        max_seq_len=max_seq_len,
        sequence_length=length,
        sequences=sequences,
        full_sequences=full_sequences,
        max_num_tokens=num_tokens,
        suggested_max_batch_size=_suggested_batch(sequences, _batch_limit(target)),
        suggested_max_num_tokens=suggested_tokens,
        engine_bytes=size,
        fetch_s=size / bytes_per_s,
        problem=_problem(spec, target, load, full_sequences, max_seq_len),
    )


def _load(spec: ModelFile, shape: ModelShape, target: Target, num_tokens: int) -> _Load:
    tensor, pipeline = spec.tensor_parallel or 1, spec.pipeline_parallel or 1
    batch_size = spec.max_batch_size or _batch_limit(target)
    return _Load(
        weights=weight_bytes_per_gpu(shape, _precision(spec), tensor, pipeline),
        activations=activation_bytes(shape, num_tokens, batch_size, tensor),
        reserved=CPU_RESERVED_BYTES if target.device_type == "cpu" else GPU_RESERVED_BYTES,
        kv_bytes=kv_bytes_per_token(shape, cache_precision(spec), tensor, pipeline),
    )


def _gpus(spec: ModelFile) -> int:
    return (spec.tensor_parallel or 1) * (spec.pipeline_parallel or 1)


def _batch_limit(target: Target) -> int:
    return CPU_BATCH_LIMIT if target.device_type == "cpu" else BATCH_LIMIT


def _precision(spec: ModelFile) -> str:
    precision = spec.precision or KINDS[spec.kind].default_precision
    if precision not in PRECISIONS:
        raise InvalidFieldError("kind", f"{spec.kind} has no weights, so there is nothing to plan")
    return precision


def cache_precision(spec: ModelFile) -> str:
    """What a model file makes of the KV cache; "auto" where the kind or the model decides."""
    if spec.kv_cache_precision:
        return spec.kv_cache_precision
    if spec.kind != "openvino":
        return "auto"
    is_fast = spec.options.get("profile") == "fast"
    # The plugin's own default is u8; f16 would round enough to change an answer in company now and then.
    return "u8" if is_fast else "f32"


def _sequence_length(spec: ModelFile, shape: ModelShape) -> int:
    if spec.max_seq_len > shape.context_length:
        raise InvalidFieldError(
            "max_seq_len", f"{spec.max_seq_len} is over the model's context of {shape.context_length} tokens"
        )
    return spec.max_seq_len or shape.context_length


def _suggested_num_tokens(shape: ModelShape, target: Target, tensor_parallel: int) -> int:
    """The most tokens a step whose activations take a small share of the device."""
    if target.device_type == "cpu":
        return CPU_NUM_TOKENS
    limit = ACTIVATION_SHARE * target.memory_bytes
    return next(
        (tokens for tokens in NUM_TOKENS if activation_bytes(shape, tokens, 0, tensor_parallel) <= limit),
        NUM_TOKENS[-1],
    )


def _cache_room(spec: ModelFile, target: Target, load: _Load, max_seq_len: int) -> int:
    """What the engine kind gives to its KV cache, per device.

    On a CPU the cache is small however large the host is.
    """
    left = max(0, target.memory_bytes - load.total)
    if target.device_type == "cpu":
        return min(left, max(CPU_CACHE_BYTES, sequence_bytes(load.kv_bytes, max_seq_len)))
    kind = KINDS[spec.kind]
    rule = kind.cache_share
    if rule is None:
        return left
    share = float(spec.options.get(rule.option) or kind.options[rule.option].default)
    if rule.is_of_device:
        return max(0, int(share * target.memory_bytes) - load.total)
    return int(share * left)


def _suggested_batch(sequences: int, limit: int) -> int:
    batch = min(sequences, limit)
    return batch if batch < _BATCH_STEP else batch // _BATCH_STEP * _BATCH_STEP


def _problem(spec: ModelFile, target: Target, load: _Load, full_sequences: int, max_seq_len: int) -> str:
    precision = _precision(spec)
    if target.device_type == "gpu" and precision not in supported_precisions(target.compute_capability):
        return f"does not compute in {precision}"
    if _gpus(spec) > 1 and target.mig_profile:
        return "GPUs that share a model are whole ones"  # slices have no way to each other
    if load.total > target.memory_bytes:
        return f"weights and a step take {_gib(load.total)} GiB"
    if not full_sequences:
        return f"no room for a sequence of {max_seq_len} tokens"
    return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
