"""Kind `openvino`: folders of safetensors, adapters in the weights, draft models. Checked by NumPy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from build_worker.backends import openvino
from build_worker.lora import LoraAdapter
from mesh import capabilities
from mesh.errors import InvalidFieldError, PreconditionError
from mesh.model_fields import LoraAdapter as LoraField
from mesh.model_fields import Speculation
from mesh.model_file import ModelFile
from tests.build_worker import tiny_hub
from tests.build_worker.helpers import build_here
from tests.build_worker.tiny_gguf import CONTEXT, write_tiny_gguf

pytestmark = pytest.mark.openvino

SPEC = ModelFile(model="tiny", kind="openvino", source="hub", precision="fp16")
LORA = (LoraField(name="tone", source="lora"),)
IDS = [5, 9, 77, 31, 200, 4, 8, 15, 16, 23]
CLOSE = 0.01
LOOKUP = Speculation(method="prompt_lookup")
DRAFT = Speculation(method="draft_model", source="draft")


def build(folder, source, more=None, **fields):
    """The engine's folder and its manifest."""
    manifest = build_here(folder, SPEC.model_copy(update=fields), source, more)
    return folder / "engine", manifest


def engine_logits(folder, ids):
    """The logits of each position, by the engine's own graph."""
    import openvino as ov

    path = folder / "openvino_model.xml"
    model = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    inputs = {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, len(ids)), dtype=np.int64),
        "position_ids": np.arange(len(ids))[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    return model.create_infer_request().infer(inputs)["logits"][0]


def difference(folder, weights):
    return np.abs(engine_logits(folder, IDS) - tiny_hub.logits(weights, IDS)).max()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of safetensors in two files, and its weights."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    return folder, tiny_hub.write_tiny_hub(folder, parts=2)


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen2"}])
def test_engine_of_a_folder_computes_what_its_weights_say(tmp_path, fields):
    weights = tiny_hub.write_tiny_hub(tmp_path / "hub", **fields)
    engine, manifest = build(tmp_path / "build", tmp_path / "hub")

    assert difference(engine, weights) < CLOSE
    assert manifest.max_seq_len == CONTEXT
    assert manifest.tokenizer.eos_token_ids == (2,)
    assert not list(engine.glob("openvino_*tokenizer.*"))


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True, "lora_alpha": tiny_hub.ALPHA / 2}])
def test_adapter_is_in_the_weights(hub, tmp_path, fields):
    folder, weights = hub
    lora = tiny_hub.write_tiny_lora(tmp_path / "lora", modules=tuple(tiny_hub.MODULES), **fields)
    engine, manifest = build(tmp_path / "build", folder, {"lora[0].source": tmp_path / "lora"}, lora=LORA)

    assert difference(engine, tiny_hub.merged(weights, lora)) < CLOSE
    assert difference(engine, weights) > 100 * CLOSE
    assert manifest.options["lora"] == "tone"


def test_adapter_is_in_the_weights_of_a_gguf_file(tmp_path):
    """GGUF orders the rows of queries and keys otherwise; the adapter's follow."""
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    lora = tiny_hub.write_tiny_lora(tmp_path / "lora", modules=("self_attn.q_proj", "mlp.down_proj"))
    engine, _ = build(tmp_path / "build", source, {"lora[0].source": tmp_path / "lora"}, lora=LORA)

    weights = tiny_hub.weights_of_gguf(source)
    assert difference(engine, tiny_hub.merged(weights, lora)) < difference(engine, weights) / 20


def test_model_without_an_own_head_takes_no_adapter_for_it(tmp_path):
    tiny_hub.write_tiny_hub(tmp_path / "hub", tie_word_embeddings=True)
    tiny_hub.write_tiny_lora(tmp_path / "lora")
    shapes = {"A": (4, tiny_hub.HIDDEN), "B": (268, 4)}
    tensors = {f"base_model.model.lm_head.lora_{p}.weight": np.ones(s, "f4") for p, s in shapes.items()}
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")

    with pytest.raises(InvalidFieldError, match=r"spec\.lora\[0\]\.source: changes lm_head"):
        build(tmp_path / "build", tmp_path / "hub", {"lora[0].source": tmp_path / "lora"}, lora=LORA)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "type 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_alpha": "much"}, "no number 'lora_alpha'"),
    ],
)
def test_adapter_of_another_form_is_refused(tmp_path, config, words):
    tiny_hub.write_tiny_lora(tmp_path, **config)
    with pytest.raises(InvalidFieldError, match=words):
        LoraAdapter(tmp_path, "spec.lora[0].source")


def test_adapter_of_another_model_is_refused(tmp_path):
    tiny_hub.write_tiny_lora(tmp_path)
    with pytest.raises(InvalidFieldError, match=r"the model has \(64, 64\)"):
        LoraAdapter(tmp_path, "lora").delta("model.layers.0.self_attn.q_proj", (64, 64))


def test_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(InvalidFieldError, match=r"there is no adapter_config\.json"):
        LoraAdapter(tmp_path, "lora")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma"},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"use_sliding_window": True},
        {"quantization_config": {"bits": 4}},
    ],
)
def test_folder_that_only_an_export_reads_takes_no_adapter(tmp_path, config):
    tiny_hub.write_tiny_hub(tmp_path / "hub", **config)
    tiny_hub.write_tiny_lora(tmp_path / "lora")
    with pytest.raises(InvalidFieldError, match="an adapter cannot be built into this model"):
        build(tmp_path / "build", tmp_path / "hub", {"lora[0].source": tmp_path / "lora"}, lora=LORA)


def test_damaged_weights_are_refused(tmp_path):
    tiny_hub.write_tiny_hub(tmp_path / "hub")
    file = next((tmp_path / "hub").glob("*.safetensors"))
    data = file.read_bytes()
    for damaged in (b"", data[:5], data[:200], data[:-1], b"\xff" * 8 + data[8:]):
        file.write_bytes(damaged)
        with pytest.raises((InvalidFieldError, PreconditionError), match=r"spec\.source"):
            build(tmp_path / str(len(damaged)) / damaged[:4].hex(), tmp_path / "hub")


def test_folder_that_lacks_weights_is_refused(tmp_path):
    tiny_hub.write_tiny_hub(tmp_path / "hub", num_hidden_layers=3)
    with pytest.raises(InvalidFieldError, match=r"hold no blk\.2\.attn_q\.weight"):
        build(tmp_path / "build", tmp_path / "hub")


def test_bfloat16_is_read_exactly(tmp_path):
    from build_worker.tensor_files import TensorFiles

    values = np.array([1.5, -2.0, 3e-5, 0.0], dtype=np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + halves.tobytes())

    read = TensorFiles([tmp_path / "x.safetensors"], "spec.source").read("x")
    assert read.tolist() == (halves.astype(np.uint32) << 16).view(np.float32).reshape(2, 2).tolist()


def test_draft_model_is_part_of_the_engine(hub, tmp_path):
    folder, _ = hub
    fields = {"speculation": DRAFT, "max_batch_size": 2, "max_seq_len": 256}
    engine, manifest = build(tmp_path, folder, {"speculation.source": folder}, **fields)

    assert (engine / "draft" / "openvino_model.bin").stat().st_size > 0
    assert manifest.options["speculation"] == "draft_model"
    assert capabilities.GREEDY_ONLY in manifest.capabilities
    assert capabilities.SEED not in manifest.capabilities
    assert manifest.max_num_tokens == 256
    assert manifest.kv_bytes_per_token == 2 * 1024


def test_draft_model_of_another_vocabulary_is_refused(hub, tmp_path):
    folder, _ = hub
    tiny_hub.write_tiny_hub(tmp_path / "draft")
    tokenizer = json.loads((tmp_path / "draft" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(
        InvalidFieldError, match=r"spec\.speculation\.source: the draft model has other tokens"
    ):
        build(tmp_path / "build", folder, {"speculation.source": tmp_path / "draft"}, speculation=DRAFT)


@pytest.mark.parametrize(
    ("speculation", "needed"), [(LOOKUP, 320), (DRAFT.model_copy(update={"tokens": 1}), 512)]
)
def test_step_without_room_for_speculation_is_refused_early(speculation, needed):
    spec = SPEC.model_copy(update={"speculation": speculation, "max_num_tokens": 256, "max_seq_len": 512})
    with pytest.raises(InvalidFieldError, match=f"a step needs room for {needed}"):
        openvino.OpenVinoBuilder().validate(spec)


@pytest.mark.parametrize("speculation", [None, LOOKUP, DRAFT])
def test_only_engines_with_a_fine_cache_are_called_reproducible(speculation):
    for precision in ("", "f16", "f32", "u8", "u4"):
        spec = SPEC.model_copy(update={"kv_cache_precision": precision, "speculation": speculation})
        listed = openvino.capabilities_of(spec)
        assert (capabilities.REPRODUCIBLE in listed) == (precision in {"", "f32"})


def test_precision_of_the_cache_is_told_to_the_runner(hub, tmp_path):
    _, manifest = build(tmp_path, hub[0], kv_cache_precision="u8")
    assert manifest.options["kv_cache_precision"] == "u8"
    assert manifest.kv_bytes_per_token < 512
