"""The first part of a TensorRT-LLM build for real: nvidia-modelopt on a Llama of two layers, on this CPU.

`make test-modelopt` sets its environment up and runs this; elsewhere it is skipped.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from build_worker.backends.base import BuildInput
from build_worker.backends.tensorrt_llm_checkpoint import Checkpoint, make_checkpoint
from build_worker.backends.tensorrt_llm_flags import build_flags
from build_worker.backends.tensorrt_llm_tools import run_build
from mesh.model_file import ModelFile
from mesh.target import Target
from tests.stand_ins.paths import TRTLLM_BUILD
from tests.stand_ins.tensorrt_llm_engine import tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("ENGINEMESH_TEST_MODELOPT", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs the environment of nvidia-modelopt: make test-modelopt"),
    pytest.mark.timeout(600),
]

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, VOCAB = 2, 256, 512, 4, 2, 256
KV = HIDDEN // HEADS * KV_HEADS
GROUP = 128
MAKE_LLAMA = f"""
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size={VOCAB}, hidden_size={HIDDEN}, intermediate_size={MLP}, num_hidden_layers={LAYERS},
    num_attention_heads={HEADS}, num_key_value_heads={KV_HEADS}, max_position_embeddings=256, eos_token_id=2)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""
LINEAR = {
    "attention.qkv": (HIDDEN + 2 * KV, HIDDEN),
    "attention.dense": (HIDDEN, HIDDEN),
    "mlp.fc": (MLP, HIDDEN),
    "mlp.gate": (MLP, HIDDEN),
    "mlp.proj": (HIDDEN, MLP),
}
ROW_SPLIT = ("attention.dense", "mlp.proj")
"""Tensor parallelism divides the inputs of these, and the outputs of the others."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    subprocess.run([PYTHON, "-c", MAKE_LLAMA, str(folder)], check=True)
    (folder / "tokenizer.json").write_bytes(tokenizer())
    return folder


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def expected(precision, cache, tensor_parallel, layers=LAYERS):
    """What a rank's file holds, of all ranks of a stage alike."""
    half = "F16" if precision == "fp16" else "BF16"
    found = {}
    for layer in range(layers):
        name = f"transformer.layers.{layer}"
        for norm in ("input_layernorm", "post_layernorm"):
            found[f"{name}.{norm}.weight"] = (half, (HIDDEN,))
        for linear, (rows, columns) in LINEAR.items():
            if linear in ROW_SPLIT:
                shape = (rows, columns // tensor_parallel)
            else:
                shape = (rows // tensor_parallel, columns)
            parts = linear_tensors(precision, half, *shape)
            found |= {f"{name}.{linear}.{part}": value for part, value in parts.items()}
        if cache:
            for part in ("k", "v", "kv"):
                found[f"{name}.attention.{part}_cache_scaling_factor"] = ("F32", (1,))
    ends = {
        "transformer.vocab_embedding.weight": (half, (VOCAB // tensor_parallel, HIDDEN)),
        "transformer.ln_f.weight": (half, (HIDDEN,)),
        "lm_head.weight": (half, (VOCAB // tensor_parallel, HIDDEN)),
    }
    return found, ends


def linear_tensors(precision, half, rows, columns):
    one, inputs = ("F32", (1,)), (half, (columns,))
    packed = {"weight": ("I8", (rows // 2, columns)), "prequant_scaling_factor": inputs}
    return {
        "bf16": {"weight": (half, (rows, columns))},
        "fp16": {"weight": (half, (rows, columns))},
        "fp8": {
            "weight": ("F8_E4M3", (rows, columns)),
            "activation_scaling_factor": one,
            "weights_scaling_factor": one,
        },
        "int8_sq": {
            "weight": ("I8", (rows, columns)),
            "activation_scaling_factor": one,
            "weights_scaling_factor": ("F32", (rows,)),
            "prequant_scaling_factor": inputs,
        },
        "int4_awq": {**packed, "weights_scaling_factor": ("F32", (rows, columns // GROUP))},
        "w4a8_awq": {
            **packed,
            "weights_scaling_factor": ("F32", (rows, columns // GROUP)),
            "weights_scaling_factor_2": one,
            "activation_scaling_factor": one,
        },
    }[precision]


CASES = [
    ("bf16", "", 1, None, None),
    ("fp16", "fp8", 1, None, "FP8"),
    ("fp8", "fp8", 2, "FP8", "FP8"),
    ("int8_sq", "int8", 1, "W8A8_SQ_PER_CHANNEL", "INT8"),
    ("int4_awq", "", 2, "W4A16_AWQ", None),
    ("w4a8_awq", "fp8", 1, "W4A8_AWQ", "FP8"),
]


@pytest.fixture
def make(llama, tmp_path):
    """Makes a checkpoint; returns its folder and the progress that was told."""

    def call(**fields):
        spec = ModelFile(model="m", kind="tensorrt_llm", source="s", **fields)
        spec.check()
        folders = [tmp_path / name for name in ("work", "output", "checkpoint")]
        for folder in folders:
            folder.mkdir()
        job = BuildInput(spec, llama, Target.from_name("h100-sxm-80gb"), folders[0], folders[1])
        told = []
        make_checkpoint(job, PYTHON, folders[2], lambda fraction, what: told.append((fraction, what)))
        return spec, folders[2], told

    return call


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_has_the_tensors_of_its_format(make, case):
    precision, cache, ranks, algorithm, cache_algorithm = case
    calibration = {} if precision in ("bf16", "fp16") else {"calibration": {"samples": 4, "seq_len": 64}}
    spec, folder, told = make(
        precision=precision, kv_cache_precision=cache, tensor_parallel=ranks, **calibration
    )

    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "LlamaForCausalLM"
    assert config["dtype"] == ("float16" if precision == "fp16" else "bfloat16")
    assert config["quantization"]["quant_algo"] == algorithm
    assert config["quantization"]["kv_cache_quant_algo"] == cache_algorithm
    assert config["mapping"] == {"world_size": ranks, "tp_size": ranks, "pp_size": 1}
    assert config["num_hidden_layers"] == LAYERS
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"rank{rank}.safetensors" for rank in range(ranks)]
    layers, ends = expected(precision, cache, ranks)
    for name in files:
        assert tensors(folder / name) == layers | ends
    fractions = [fraction for fraction, _ in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    compile_with_stand_in(spec, folder)


def compile_with_stand_in(spec, folder):
    """The next part takes the checkpoint."""
    engine = folder.parent / "engine"
    words = [str(TRTLLM_BUILD), "--checkpoint_dir", str(folder), "--output_dir", str(engine)]
    words += ["--output_timing_cache", str(folder.parent / "cache"), *build_flags(spec, 256, 0, [])]
    run_build(words, folder.parent, Checkpoint(folder).ranks, lambda *_: None)
    assert len(list(engine.glob("rank*.engine"))) == Checkpoint(folder).ranks


def test_stages_of_a_pipeline_have_different_layers(make):
    _, folder, _ = make(precision="bf16", pipeline_parallel=2)

    layers, ends = expected("bf16", "", 1, layers=1)
    first, last = (tensors(folder / f"rank{rank}.safetensors") for rank in range(2))
    embedding = "transformer.vocab_embedding.weight"
    assert first == layers | {embedding: ends.pop(embedding)}
    assert last == layers | ends
    assert json.loads((folder / "config.json").read_text())["mapping"]["pp_size"] == 2
