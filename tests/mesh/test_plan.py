"""Plans say what fits where, and why something does not."""

from __future__ import annotations

import re

import pytest

from mesh.errors import InvalidFieldError
from mesh.model_file import ModelFile
from mesh.model_shape import KNOWN_SHAPES
from mesh.plan import GPU_RESERVED_BYTES, make_plan
from mesh.sizing import CPU_CACHE_BYTES, sequence_bytes, weight_bytes
from mesh.target import Target

GIB = 1 << 30
BYTES_PER_S = 1.25e9


def spec(kind: str = "tensorrt_llm", **fields) -> ModelFile:
    made = ModelFile(model="m", kind=kind, source="s", **fields)
    made.check()
    return made


def plan(model: str, target: str, asked: ModelFile, **more):
    return make_plan(asked, KNOWN_SHAPES[model], Target.from_name(target), BYTES_PER_S, **more)


def test_8b_on_an_h100_leaves_most_to_the_cache():
    made = plan("llama-3.1-8b", "h100-sxm-80gb", spec(precision="fp8", max_seq_len=8192))

    assert made.fits
    assert made.kv_bytes_per_token == made.kv_bytes_per_token_per_gpu == 128 << 10
    taken = made.weight_bytes_per_gpu + made.activation_bytes + made.reserved_bytes
    assert made.kv_cache_bytes == int(0.9 * (made.memory_bytes - taken))
    assert made.kv_cache_tokens == made.kv_cache_bytes // (128 << 10)
    assert made.full_sequences == made.sequences == made.kv_cache_tokens // 8192
    assert made.suggested_max_batch_size == made.sequences // 8 * 8
    assert made.suggested_max_num_tokens == made.max_num_tokens == 8192
    assert made.fetch_s == made.engine_bytes / BYTES_PER_S


def test_more_short_sequences_than_long_ones_run_at_once():
    asked = spec(precision="fp8", max_seq_len=8192)
    long = plan("llama-3.1-8b", "h100-sxm-80gb", asked)
    short = plan("llama-3.1-8b", "h100-sxm-80gb", asked, sequence_length=512)

    assert short.sequences // 16 in (long.sequences, long.sequences + 1)
    assert short.full_sequences == long.full_sequences
    assert short.suggested_max_batch_size == 512  # enough to keep any GPU busy
    assert plan("llama-3.1-8b", "h100-sxm-80gb", asked, sequence_length=1 << 20).sequences == long.sequences


@pytest.mark.parametrize(
    ("target", "asked", "problem"),
    [
        ("l4", spec(precision="bf16"), "no room for a sequence of 131072 tokens"),
        ("l4", spec(precision="bf16", max_seq_len=8192), ""),
        ("a10", spec(precision="fp8"), "does not compute in fp8"),
        ("h200", spec(precision="nvfp4"), "does not compute in nvfp4"),
        ("b200", spec(precision="nvfp4"), ""),
        ("a100-sxm-40gb:mig-1g.5gb", spec(precision="int4_awq"), "weights and a step take 7.0 GiB"),
        ("h100-sxm-80gb:mig-1g.20gb", spec(precision="fp8", max_seq_len=4096), ""),
        ("h100-sxm-80gb:mig-1g.10gb", spec(precision="bf16", max_seq_len=512), "weights and a step take"),
    ],
)
def test_8b_fits_or_the_plan_says_why_not(target, asked, problem):
    made = plan("llama-3.1-8b", target, asked)

    assert made.fits == (not problem)
    assert re.match(problem, made.problem)


def test_70b_needs_its_four_gpus():
    alone = plan("llama-3.1-70b", "h100-sxm-80gb", spec(precision="bf16", max_seq_len=8192))
    group = plan(
        "llama-3.1-70b", "h100-sxm-80gb", spec(precision="bf16", max_seq_len=8192, tensor_parallel=4)
    )

    assert not alone.fits
    assert group.fits
    assert (group.gpus, group.weight_bytes) == (4, alone.weight_bytes)
    assert group.kv_bytes_per_token_per_gpu == group.kv_bytes_per_token // 4
    assert group.sequences >= 8


def test_slices_do_not_share_a_model():
    made = plan("llama-3.1-8b", "h200:mig-3g.71gb", spec(tensor_parallel=2))

    assert made.problem == "GPUs that share a model are whole ones"


def test_narrower_cache_holds_more():
    wide = plan("llama-3.1-8b", "h200", spec(precision="fp8"))
    narrow = plan("llama-3.1-8b", "h200", spec(precision="fp8", kv_cache_precision="fp8"))

    assert narrow.kv_cache_tokens == pytest.approx(2 * wide.kv_cache_tokens, rel=0.001)
    assert (wide.kv_cache_precision, narrow.kv_cache_precision) == ("auto", "fp8")


def test_share_of_the_memory_is_the_kinds():
    trt = plan("llama-3.1-8b", "h200", spec(options={"free_gpu_memory_fraction": 0.5}))
    vllm = plan("llama-3.1-8b", "h200", spec("vllm"))
    half = plan("llama-3.1-8b", "h200", spec("vllm", options={"gpu_memory_utilization": "0.5"}))

    taken = vllm.weight_bytes_per_gpu + vllm.activation_bytes + GPU_RESERVED_BYTES
    assert trt.kv_cache_bytes == (trt.memory_bytes - taken) // 2
    assert vllm.kv_cache_bytes == int(0.9 * vllm.memory_bytes) - taken
    assert half.kv_cache_bytes == int(0.5 * vllm.memory_bytes) - taken


def test_step_is_smaller_on_a_small_slice():
    small = plan("tinyllama-1.1b", "a100-sxm-40gb:mig-1g.5gb", spec())

    assert small.suggested_max_num_tokens < 8192
    assert small.activation_bytes < 0.1 * small.memory_bytes
    asked = plan("tinyllama-1.1b", "a100-sxm-40gb:mig-1g.5gb", spec(max_num_tokens=512))
    assert asked.max_num_tokens == 512


def test_cpu_engine_keeps_its_cache_small():
    cpu = Target(
        device_type="cpu",
        device_name="",
        architecture="x86_64",
        instruction_set="avx2",
        memory_bytes=64 * GIB,
    )
    smol = make_plan(spec("openvino"), KNOWN_SHAPES["smollm2-135m"], cpu, BYTES_PER_S)
    large = make_plan(spec("openvino"), KNOWN_SHAPES["llama-3.1-8b"], cpu, BYTES_PER_S)

    assert smol.fits
    assert smol.kv_cache_bytes == CPU_CACHE_BYTES
    assert smol.weight_bytes == weight_bytes(KNOWN_SHAPES["smollm2-135m"], "int8")
    assert large.kv_cache_bytes == sequence_bytes(large.kv_bytes_per_token, 131_072)
    assert large.full_sequences == 1
    fast = make_plan(
        spec("openvino", options={"profile": "fast"}), KNOWN_SHAPES["smollm2-135m"], cpu, BYTES_PER_S
    )
    assert fast.kv_cache_precision == "u8"


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (ModelFile(model="m", kind="fake"), "kind: fake has no weights"),
        (spec(max_seq_len=200_000), "max_seq_len: 200000 is over the model's context of 131072"),
    ],
)
def test_what_cannot_be_planned_is_refused(asked, problem):
    with pytest.raises(InvalidFieldError, match=problem):
        plan("llama-3.1-8b", "h200", asked)
