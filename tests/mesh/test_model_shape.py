"""The shape of a model is read from what lies beside its weights."""

from __future__ import annotations

import json

import pytest

from mesh.errors import InvalidFieldError
from mesh.model_shape import KNOWN_SHAPES, find_shape, read_shape, shape_from_config
from tests.build_worker import tiny_gguf

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As the models' authors count them.
    [
        ("smollm2-135m", 134_515_008),
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
    ],
)
def test_parameters_are_counted_as_their_authors_do(name, parameters):
    assert KNOWN_SHAPES[name].parameters == parameters


def test_config_of_a_known_model_gives_its_shape():
    assert shape_from_config(LLAMA_31_8B) == KNOWN_SHAPES["llama-3.1-8b"]


def test_what_config_leaves_out_has_its_default():
    config = {**LLAMA_31_8B, "model_type": "phi"}
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    shape = shape_from_config(config)

    assert (shape.kv_heads, shape.head_size, shape.is_tied, shape.is_gated) == (32, 128, False, False)
    assert shape_from_config({**config, "model_type": "gemma", "head_dim": 256}).is_tied
    assert shape_from_config({**config, "head_dim": 256}).head_size == 256
    assert shape_from_config({"text_config": LLAMA_31_8B, "model_type": "some_vision"}).hidden == 4096


def test_mixture_of_experts_counts_all_of_them():
    # Mixtral 8x7B: 46.7 billion parameters.
    mixtral = {**LLAMA_31_8B, "model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}

    assert shape_from_config(mixtral).parameters == pytest.approx(46.70e9, rel=0.001)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"hidden_size": None}, "'hidden_size'"),
        ({"num_hidden_layers": "32"}, "'num_hidden_layers'"),
        ({"vocab_size": 0}, "'vocab_size'"),
    ],
)
def test_config_that_is_not_reckoned_with_is_refused(change, problem):
    with pytest.raises(InvalidFieldError, match=problem) as seen:
        shape_from_config({**LLAMA_31_8B, **change})
    assert seen.value.field == "source"


def test_gguf_tells_its_shape(tmp_path):
    shape = read_shape(tiny_gguf.write_tiny_gguf(tmp_path / "model.gguf"))

    assert (shape.layers, shape.hidden, shape.intermediate) == (2, 128, 256)
    assert (shape.heads, shape.kv_heads, shape.head_size, shape.context_length) == (4, 2, 32, 512)
    assert shape.is_tied
    assert shape.is_gated
    assert shape.vocab > 256
    assert read_shape(tmp_path) == shape


def test_folder_is_looked_for_beside_the_file(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(LLAMA_31_8B))

    assert find_shape("weights", "m", [tmp_path]) == KNOWN_SHAPES["llama-3.1-8b"]
    assert find_shape(str(tmp_path / "weights"), "m") == KNOWN_SHAPES["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("source", "model", "known"),
    [
        ("hf://meta-llama/Llama-3.1-8B-Instruct", "my-model", "llama-3.1-8b"),
        ("hf://meta-llama/Meta-Llama-3.1-70B", "m", "llama-3.1-70b"),
        ("hf://TinyLlama/TinyLlama-1.1B-Chat-v1.0", "m", "tinyllama-1.1b"),
        ("s3://models/Llama-2-7b-hf/", "m", "llama-2-7b"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "m", "smollm2-135m"),
        ("elsewhere", "smollm2-135m-instruct", "smollm2-135m"),
    ],
)
def test_known_name_stands_for_a_source_elsewhere(source, model, known):
    assert find_shape(source, model) is KNOWN_SHAPES[known]


@pytest.mark.parametrize("source", ["", "hf://owner/unheard-of", "no/such/folder"])
def test_unknown_source_is_refused_with_what_helps(source):
    with pytest.raises(InvalidFieldError, match=r"config\.json.*llama-3\.1-8b"):
        find_shape(source, "m")


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(InvalidFieldError, match="neither"):
        read_shape(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidFieldError, match="not a whole GGUF"):
        read_shape(tmp_path)
    for text, problem in (("{", "not JSON"), ("[]", "not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidFieldError, match=problem):
            read_shape(tmp_path)
