"""`enginemesh plan` reckons for one target, for several, and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh.gpus import target_names
from mesh.kinds import KINDS
from mesh.model_file import ModelFile

EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[2] / "examples" / "models").glob("*.yaml"))
    if KINDS[ModelFile.load(path).kind].needs_source
]
LLAMA = """
model: llama
kind: tensorrt_llm
source: hf://meta-llama/Llama-3.1-8B-Instruct
precision: fp8
max_seq_len: 8192
"""


@pytest.fixture
def model_file(tmp_path):
    def write(text: str):
        path = tmp_path / "model.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_one_target_is_told_in_full(invoke, model_file):
    out = invoke("plan", model_file(LLAMA), "--gpu", "h200").stdout

    assert out.startswith("h200: fits")
    assert "8,030,261,248" in out
    assert "weights (fp8)" in out
    assert "131072 B of 131072 B" in out
    assert "suggested max_batch_size" in out


@pytest.mark.parametrize("gpu", ["h100", "H100"])
def test_beginning_of_names_gives_a_table(invoke, model_file, gpu):
    out = invoke("plan", model_file(LLAMA), "--gpu", gpu).stdout

    assert "8.03 billion parameters" in out
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("h100")]
    assert rows == [name for name in target_names() if name.startswith("h100")]


def test_all_known_gpus_are_listed_with_what_is_wrong(invoke, model_file):
    out = invoke("plan", model_file(LLAMA)).stdout

    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert set(target_names()) <= set(lines)
    assert "does not compute in fp8" in lines["a10"]
    assert "yes" in lines["l4"]


def test_json_has_plain_numbers(invoke, model_file):
    result = invoke("plan", model_file(LLAMA), "--gpu", "b200", "--json", "--network-gbit", "100")
    (found,) = json.loads(result.stdout)

    assert found["target"] == "b200"
    assert found["fits"] is True
    assert found["kv_bytes_per_token"] == 131072
    assert found["parameters"] == 8_030_261_248
    assert found["fetch_s"] == pytest.approx(found["engine_bytes"] / 12.5e9)
    texts = {"target", "precision", "kv_cache_precision", "problem"}
    assert {name for name, value in found.items() if isinstance(value, str)} == texts


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_fit_where_they_say(invoke, path):
    found = json.loads(invoke("plan", str(path), "--json").stdout)
    fits = {plan["target"]: plan["problem"] for plan in found}
    spec = ModelFile.load(path)

    assert {name: fits[name] for name in spec.targets if fits.get(name)} == {}
    assert any(plan["fits"] for plan in found)


def test_length_of_sequences_is_an_option(invoke, model_file):
    path = model_file(LLAMA)
    (long,) = json.loads(invoke("plan", path, "--gpu", "h200", "--json").stdout)
    (short,) = json.loads(invoke("plan", path, "--gpu", "h200", "--json", "--length", "1024").stdout)

    assert short["sequences"] > long["sequences"] == long["full_sequences"]
    assert short["sequence_length"] == 1024


def test_model_that_fits_nowhere_ends_with_failure(invoke, model_file):
    text = LLAMA.replace("8B", "70B").replace("fp8", "bf16")
    result = invoke("plan", model_file(text), "--gpu", "l4")

    assert result.exit_code == 1
    assert "weights and a step take" in result.stdout


def test_cpu_kind_is_planned_for_this_host(invoke, model_file, run_command):
    text = "model: smollm2-135m-instruct\nkind: openvino\nsource: elsewhere\n"
    (found,) = json.loads(invoke("plan", model_file(text), "--json").stdout)

    assert found["target"].startswith("cpu-")
    assert found["weight_bytes"] == pytest.approx(135e6, rel=0.01)
    status, _, error = run_command("plan", model_file(text), "--gpu", "h100")
    assert (status, "--gpu: kind openvino runs on CPUs" in error) == (2, True)


def test_config_beside_the_file_is_read(invoke, model_file, tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
    text = "model: mine\nkind: vllm\nsource: weights\n"
    (found,) = json.loads(invoke("plan", model_file(text), "--gpu", "l4", "--json").stdout)

    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2
    assert found["max_seq_len"] == 512


@pytest.mark.parametrize(
    ("text", "arguments", "problem"),
    [
        (LLAMA, ["--gpu", "voodoo"], "--gpu: none is named 'voodoo'"),
        (LLAMA.replace("Llama-3.1-8B", "Unheard"), [], "tells no shape"),
        ("model: m\nkind: tensorrt_llm\n", [], "source"),
    ],
)
def test_mistakes_are_one_line(run_command, model_file, text, arguments, problem):
    status, _, error = run_command("plan", model_file(text), *arguments)

    assert status == 2
    assert problem in error
