"""Formulas of memory agree with models and engines that were measured."""

from __future__ import annotations

import pytest

from mesh.model_shape import KNOWN_SHAPES
from mesh.sizing import (
    BLOCK_TOKENS,
    activation_bytes,
    engine_bytes,
    kv_bytes_per_token,
    sequence_bytes,
    weight_bytes,
    weight_bytes_per_gpu,
)

SMOL, TINY = KNOWN_SHAPES["smollm2-135m"], KNOWN_SHAPES["tinyllama-1.1b"]
LLAMA_2, LLAMA_8B, LLAMA_70B = (
    KNOWN_SHAPES[name] for name in ("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b")
)
WITHIN = 0.05


def test_llama_2_7b_takes_half_a_mebibyte_of_cache_per_token():
    assert kv_bytes_per_token(LLAMA_2, "fp16") == 512 << 10
    assert kv_bytes_per_token(LLAMA_2, "fp8") == 256 << 10


def test_tinyllama_takes_what_its_checkpoints_do():
    assert weight_bytes(TINY, "fp16") == pytest.approx(2.2e9, rel=0.01)
    assert weight_bytes(TINY, "bf16") == weight_bytes(TINY, "fp16")
    assert weight_bytes(TINY, "fp8") == pytest.approx(1.2e9, rel=0.03)


@pytest.mark.parametrize(
    ("precision", "gigabytes"),
    # Sizes of published checkpoints of Llama-3.1-8B: safetensors, FP8 and AWQ INT4.
    [("bf16", 16.06), ("fp8", 9.08), ("int4_awq", 5.73)],
)
def test_llama_3_1_8b_takes_what_its_checkpoints_do(precision, gigabytes):
    assert weight_bytes(LLAMA_8B, precision) == pytest.approx(gigabytes * 1e9, rel=0.02)


@pytest.mark.openvino
def test_openvino_engine_has_the_size_that_is_reckoned(smollm2_engine):
    manifest = smollm2_engine.manifest

    assert engine_bytes(SMOL, manifest.precision, "openvino") == pytest.approx(manifest.size, rel=WITHIN)
    on_disk = manifest.file("openvino_model.bin").size
    assert weight_bytes(SMOL, manifest.precision) == pytest.approx(on_disk, rel=WITHIN)


@pytest.mark.openvino
@pytest.mark.parametrize("precision", ["f32", "f16", "u8"])
def test_openvino_cache_takes_what_is_reckoned(smollm2_engine, precision):
    assert smollm2_engine.manifest.kv_bytes_per_token == kv_bytes_per_token(SMOL, "f32")

    reckoned = kv_bytes_per_token(SMOL, precision)
    assert reckoned == pytest.approx(reported_kv_bytes(smollm2_engine.folder, precision), rel=WITHIN)


def reported_kv_bytes(folder, precision) -> float:
    """Bytes of a token in the caches that OpenVINO itself makes for its paged attention."""
    import openvino
    from openvino._offline_transformations import paged_attention_transformation

    core = openvino.Core()
    model = core.read_model(folder / "openvino_model.xml")
    paged_attention_transformation(model)
    compiled = core.compile_model(
        model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": precision}
    )
    caches = [port for port in compiled.inputs if "_cache." in port.any_name]
    assert len(caches) == 2 * SMOL.layers
    blocks = 0
    for port in caches:
        heads, rows, width = (dimension.get_length() for dimension in list(port.partial_shape)[1:])
        blocks += heads * rows * width * port.element_type.bitwidth / 8
    return blocks / BLOCK_TOKENS


def test_4_bit_weights_keep_their_embeddings_in_8():
    eight, four = weight_bytes(SMOL, "int8"), weight_bytes(SMOL, "int4")

    assert eight > four > weight_bytes(SMOL, "int8") / 2
    # 90 MB were measured of this model with groups of 64.
    assert four == pytest.approx(90e6, rel=WITHIN)


def test_tensor_parallel_gpus_share_layers_and_heads():
    alone = kv_bytes_per_token(LLAMA_70B)

    assert kv_bytes_per_token(LLAMA_70B, tensor_parallel=4) == alone // 4
    assert kv_bytes_per_token(LLAMA_70B, tensor_parallel=16) == alone // 8  # of 8 heads, each GPU holds one
    assert kv_bytes_per_token(LLAMA_70B, tensor_parallel=2, pipeline_parallel=2) == alone // 4
    share = weight_bytes_per_gpu(LLAMA_70B, "fp8", tensor_parallel=4)
    assert weight_bytes(LLAMA_70B, "fp8") / 4 < share < weight_bytes(LLAMA_70B, "fp8") / 3
    assert weight_bytes_per_gpu(LLAMA_70B, "fp8") == weight_bytes(LLAMA_70B, "fp8")


def test_pipeline_stages_share_layers_and_embeddings():
    half = weight_bytes_per_gpu(LLAMA_70B, "bf16", pipeline_parallel=2)

    assert half == pytest.approx(weight_bytes(LLAMA_70B, "bf16") / 2, rel=0.01)


def test_step_grows_with_tokens_and_batch():
    one = activation_bytes(LLAMA_8B, 1024, 0)

    assert activation_bytes(LLAMA_8B, 2048, 0) == 2 * one
    assert activation_bytes(LLAMA_8B, 1024, 8) - one == 8 * LLAMA_8B.vocab * 4
    assert one / 8 < activation_bytes(LLAMA_8B, 1024, 0, tensor_parallel=8) < one / 2


def test_sequences_take_whole_blocks():
    assert sequence_bytes(10, 1) == sequence_bytes(10, BLOCK_TOKENS) == 10 * BLOCK_TOKENS
    assert sequence_bytes(10, BLOCK_TOKENS + 1) == 20 * BLOCK_TOKENS


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_engine_is_little_more_than_its_weights(name):
    shape = KNOWN_SHAPES[name]

    for kind, precision in (("openvino", "int8"), ("tensorrt_llm", "bf16"), ("vllm", "fp8")):
        weights = weight_bytes(shape, precision)
        assert weights < engine_bytes(shape, precision, kind) < 1.06 * weights
