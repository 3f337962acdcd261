"""Kind `openvino`: a GGUF file or a folder becomes an engine, or a clear error."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec

import numpy as np
import pytest

from build_worker.backends.openvino import OpenVinoBuilder
from build_worker.backends.openvino_sources import open_source
from build_worker.builder_process import ChildError
from build_worker.gguf_model import GgufModel
from build_worker.gguf_tokenizer import make_tokenizer
from build_worker.stages import Stage
from mesh import capabilities
from mesh.errors import InvalidFieldError, PreconditionError
from mesh.model_file import ModelFile
from tests.build_worker.helpers import build, build_now
from tests.build_worker.tiny_gguf import CONTEXT, HIDDEN, KV_HEADS, LAYERS, TEMPLATE, write_tiny_gguf

pytestmark = pytest.mark.openvino

SPEC = ModelFile(model="tiny", kind="openvino", source="tiny.gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_engine(tiny, tmp_path_factory):
    """The tiny model's engine folder, with weights in half precision, and its manifest."""
    folder = tmp_path_factory.mktemp("engine")
    manifest = build_now(folder, SPEC.model_copy(update={"precision": "fp16"}), tiny)
    return folder / "engine", manifest


def ignore(_stage, _fraction, _detail=""):
    pass


def with_fields(**fields):
    return SPEC.model_copy(update=fields)


def test_manifest_says_what_the_model_is(tiny_engine):
    _, manifest = tiny_engine

    assert manifest.max_seq_len == CONTEXT
    assert manifest.kv_bytes_per_token == 2 * LAYERS * KV_HEADS * 32 * 4
    assert manifest.precision == "fp16"
    assert manifest.options["profile"] == "exact"
    assert "isa=" in manifest.options["runtime_requirements"]
    assert set(manifest.versions) == {"openvino", "openvino-genai"}
    assert capabilities.REPRODUCIBLE in manifest.capabilities
    assert manifest.tokenizer.chat_template == TEMPLATE
    assert manifest.tokenizer.bos_token == "<|im_start|>"
    assert manifest.tokenizer.eos_token == "<|im_end|>"
    assert manifest.tokenizer.eos_token_ids == (2,)


def test_engine_folder_holds_exactly_the_files_of_the_manifest(tiny_engine):
    folder, manifest = tiny_engine

    assert {file.path for file in manifest.files} == {
        "tokenizer.json",
        *(
            f"openvino_{part}.{kind}"
            for part in ("model", "tokenizer", "detokenizer")
            for kind in ("xml", "bin")
        ),
    }
    assert sorted(path.name for path in folder.iterdir()) == [file.path for file in manifest.files]


def test_half_precision_engine_computes_what_the_source_says(tiny, tiny_engine):
    """Embedding and head of the engine are those of the file: its logits follow from its weights."""
    import openvino as ov
    from gguf import GGUFReader

    folder, _ = tiny_engine
    model = ov.Core().read_model(folder / "openvino_model.xml")
    constants = [
        node.data for node in model.get_ops() if node.get_type_name() == "Constant" and node.data.ndim == 2
    ]
    expected = next(t.data for t in GGUFReader(tiny).tensors if t.name == "token_embd.weight")

    assert any(data.shape == expected.shape and np.array_equal(data, expected) for data in constants)


async def test_int8_engine_is_smaller_and_the_same_each_time(tiny, tiny_engine, tmp_path):
    _, half = tiny_engine
    seen = []

    first = await build(tmp_path / "1", SPEC, tiny, seen.append)
    second = await build(tmp_path / "2", SPEC, tiny)

    assert first.digest == second.digest
    assert first.precision == "int8"
    assert first.file("openvino_model.bin").size < 0.7 * half.file("openvino_model.bin").size
    stages = [progress.stage for progress in seen]
    assert list(dict.fromkeys(stages)) == [Stage.CONVERT, Stage.QUANTISE, Stage.COMPILE]
    assert stages == sorted(stages, key=list(Stage).index)


async def test_spec_overrides_what_the_model_says(tiny, tiny_engine, tmp_path):
    spec = with_fields(
        precision="int4",
        options={"profile": "fast"},
        max_seq_len=64,
        max_batch_size=2,
        chat_template="{{ 1 }}",
    )

    manifest = await build(tmp_path, spec, tiny)

    assert manifest.precision == "int4"
    assert manifest.file("openvino_model.bin").size < 0.6 * tiny_engine[1].file("openvino_model.bin").size
    assert manifest.options["profile"] == "fast"
    assert capabilities.REPRODUCIBLE not in manifest.capabilities
    assert (manifest.max_seq_len, manifest.max_batch_size) == (64, 2)
    assert manifest.tokenizer.chat_template == "{{ 1 }}"


@pytest.fixture
def openvino_folder(tiny_engine, tmp_path):
    """A Hugging Face style folder with the tiny model as OpenVINO IR."""
    folder = tmp_path / "hub"
    shutil.copytree(tiny_engine[0], folder)
    config = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 256,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 0,
        "vocab_size": 268,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>"}, "bos_token": None})
    )
    return folder


async def test_folder_with_ir_becomes_an_engine(openvino_folder, tiny_engine, tmp_path):
    manifest = await build(tmp_path / "build", SPEC, openvino_folder)

    assert manifest.precision == "int8"
    assert manifest.tokenizer.eos_token_ids == (2, 0)
    assert (manifest.tokenizer.eos_token, manifest.tokenizer.bos_token) == ("<|im_end|>", "")
    assert manifest.tokenizer.chat_template == TEMPLATE
    assert manifest.kv_bytes_per_token == tiny_engine[1].kv_bytes_per_token
    assert manifest.file("tokenizer.json") == tiny_engine[1].file("tokenizer.json")


def test_template_file_of_a_folder_comes_first(openvino_folder):
    (openvino_folder / "chat_template.jinja").write_text("{{ 'from the file' }}")

    assert open_source(openvino_folder).tokenizer("").chat_template == "{{ 'from the file' }}"


@pytest.mark.skipif(find_spec("optimum") is not None, reason="optimum-intel is installed")
def test_folder_of_safetensors_without_optimum_says_what_to_install(openvino_folder, tmp_path):
    (openvino_folder / "openvino_model.xml").unlink()
    (openvino_folder / "model.safetensors").write_bytes(b"")

    with pytest.raises(PreconditionError, match="extra `openvino-export`"):
        open_source(openvino_folder).convert(tmp_path, tmp_path, None, ignore)


async def test_folder_of_safetensors_is_exported(tiny, tmp_path):
    pytest.importorskip("optimum.intel", reason="needs the extra `openvino-export`")
    import transformers

    tokenizer = make_tokenizer(GgufModel(tiny))
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        hidden_act="gelu",  # which is not read without an export
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hub")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "hub")

    manifest = await build(tmp_path / "build", SPEC, tmp_path / "hub")

    assert manifest.precision == "int8"
    assert manifest.max_seq_len == CONTEXT
    assert manifest.tokenizer.eos_token_ids == (2,)


def test_folder_of_pickles_is_refused(openvino_folder, tmp_path):
    (openvino_folder / "openvino_model.xml").unlink()
    (openvino_folder / "pytorch_model.bin").write_bytes(b"")

    with pytest.raises(InvalidFieldError, match="neither OpenVINO IR nor safetensors"):
        open_source(openvino_folder).convert(tmp_path, tmp_path, None, ignore)


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_incomplete_folder_is_refused(openvino_folder, missing):
    (openvino_folder / missing).unlink()

    with pytest.raises(InvalidFieldError, match=missing):
        open_source(openvino_folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "no eos_token_id"),
    ],
)
def test_malformed_file_of_a_folder_is_refused(openvino_folder, name, content, words):
    (openvino_folder / name).write_text(content)

    with pytest.raises(InvalidFieldError, match=words):
        open_source(openvino_folder).tokenizer("")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "scaled RoPE"),
        ({"tensors": ["rope_freqs.weight"]}, "scaled RoPE"),
    ],
)
def test_gguf_that_openvino_would_misread_is_refused(tmp_path, changes, words):
    with pytest.raises(InvalidFieldError, match=words):
        open_source(write_tiny_gguf(tmp_path / "odd.gguf", **changes))


@pytest.mark.parametrize("length", [0, 3, 1000, 20_000])
def test_broken_gguf_is_refused(tiny, tmp_path, length):
    source = tmp_path / "broken.gguf"
    source.write_bytes(tiny.read_bytes()[:length])

    with pytest.raises(InvalidFieldError, match=r"spec\.source: not a whole GGUF file"):
        open_source(source)


def test_folder_with_one_gguf_is_that_file(tiny):
    assert open_source(tiny.parent).tokenizer("").eos_token == "<|im_end|>"


def test_folder_with_several_gguf_files_is_refused(tiny, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copyfile(tiny, tmp_path / name)

    with pytest.raises(InvalidFieldError, match="exactly one GGUF file, but 2"):
        open_source(tmp_path)


async def test_sequence_longer_than_the_context_is_refused(tiny, tmp_path):
    with pytest.raises(ChildError, match=f"more than the model's context of {CONTEXT} tokens"):
        await build(tmp_path, with_fields(max_seq_len=CONTEXT + 1), tiny)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"precision": "int3"}, "spec.precision"),
        ({"options": {"profile": "slow"}}, "spec.options.profile"),
        ({"options": {"threads": "3"}}, "spec.options.threads"),
    ],
)
def test_what_the_kind_cannot_do_is_refused_early(fields, field):
    with pytest.raises(InvalidFieldError) as caught:
        OpenVinoBuilder().validate(with_fields(**fields))

    assert caught.value.field == field


def test_sample_engine_is_whole(smollm2_engine):
    folder, manifest = smollm2_engine

    assert manifest.max_seq_len == 8192
    assert manifest.kv_bytes_per_token == 46_080
    assert manifest.tokenizer.vocab_size == 49_152
    assert 130e6 < manifest.size < 150e6
    for file in manifest.files:
        assert (folder / file.path).stat().st_size == file.size
