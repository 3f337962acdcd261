"""`enginemesh init`: what it prints is a model file, whatever is uncommented in it."""

from __future__ import annotations

import json
import re

import pytest

from cli.failures import CommandError
from cli.model_template import model_name, render
from mesh.kinds import KINDS
from mesh.model_file import ModelFile
from mesh.model_shape import KNOWN_SHAPES
from tests.build_worker.tiny_gguf import CONTEXT, write_tiny_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def load(tmp_path, text):
    path = tmp_path / "made.yaml"
    path.write_text(text)
    return ModelFile.load(path)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "TinyLlama-1.1B_Chat"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_folder_gives_a_file_that_fits_the_model(model_folder, tmp_path, invoke):
    text = invoke("init", str(model_folder)).stdout
    spec = load(tmp_path, text)

    assert (spec.model, spec.kind, spec.source) == ("tinyllama-1.1b-chat", "openvino", str(model_folder))
    assert (spec.precision, spec.max_seq_len) == ("int8", 2048)
    assert "1.10 billion weights in 22 layers" in text
    assert text.startswith("# yaml-language-server: $schema=")


def test_a_gguf_file_gives_one_too(tmp_path, invoke):
    file = write_tiny_gguf(tmp_path / "Tiny.Q4_K_M.gguf")
    spec = load(tmp_path, invoke("init", str(file), "--kind", "vllm").stdout)

    assert (spec.model, spec.kind, spec.max_seq_len) == ("tiny", "vllm", CONTEXT)


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_in_it_is_right(tmp_path, kind):
    text = render("m", kind, "my weights", KNOWN_SHAPES["llama-3.1-8b"])
    spec = load(tmp_path, re.sub(r"^# (?!yaml-language-server)", "", text, flags=re.MULTILINE))

    assert (spec.model, spec.source, spec.max_seq_len) == ("m", "my weights", 8192)
    assert spec.targets
    assert spec.serving.max_workers == 4
    assert (spec.speculation is not None) == bool(KINDS[kind].speculation)
    assert bool(spec.lora) == bool(KINDS[kind].max_lora)


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
        ("Llama 3 (mine)", "llama-3-mine"),
        ("x" * 100, "x" * 63),
        ("..", "my-model"),
        ("Model-F16", "model"),
    ],
)
def test_names_are_ones_that_clients_can_ask_for(file_name, name):
    assert model_name(file_name) == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kind", "openvno"), "did you mean openvino"),
        (("--name", "Upper"), "--name: 1 to 63 characters"),
    ],
)
def test_what_no_model_file_may_say_is_refused(model_folder, invoke, arguments, words):
    with pytest.raises(CommandError, match=words):
        invoke("init", str(model_folder), *arguments)


def test_a_folder_that_is_no_model_is_refused(tmp_path, run_command):
    status, _, err = run_command("init", str(tmp_path))

    assert status == 2
    assert "neither config.json nor exactly one GGUF file" in err
