"""Model files: what is read, what is refused, and how the refusal helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginemesh.v1 import builds_pb2
from mesh.errors import InvalidFieldError
from mesh.model_file import ModelFile, ModelFileError
from mesh.model_yaml import FILE_LIMIT_BYTES

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def load(tmp_path, text):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return ModelFile.load(path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_example_loads(path):
    spec = ModelFile.load(path)

    assert ModelFile.from_proto(spec.to_proto()) == spec.model_copy(update={"targets": ()})


EVERYTHING = """\
model: big
kind: tensorrt_llm
source: hf://owner/name
targets: [h100-sxm-80gb, "h200:mig-1g.18gb"]
precision: fp8
kv_cache_precision: fp8
calibration: {data: my-samples.txt, samples: 256, seq_len: 1024}
max_batch_size: 64
max_input_len: 3072
max_seq_len: 4096
max_num_tokens: 8192
tensor_parallel: 4
pipeline_parallel: 2
speculation: {method: medusa, source: hf://owner/heads, precision: fp16, tokens: 5}
lora:
  - {name: law, source: hf://owner/law}
  - {name: tax, source: s3://bucket/tax}
options: {reduce_fusion: true, tokens_per_block: 64, free_gpu_memory_fraction: 0.85}
chat_template: "{{ messages }}"
serving:
  max_waiting_requests: 100
  max_waiting_tokens: 1000000
  max_waiting_s: 2.5
  default_max_tokens: 512
  min_workers: 1
  max_workers: 4
  scale_down_after_s: 300
"""


def test_every_field_is_read_and_sent(tmp_path):
    spec = load(tmp_path, EVERYTHING)

    assert {name for name in ModelFile.model_fields if not getattr(spec, name)} == set()
    assert spec.options == {
        "reduce_fusion": "true",
        "tokens_per_block": "64",
        "free_gpu_memory_fraction": "0.85",
    }
    assert spec.serving.max_waiting_s == 2.5
    assert ModelFile.from_proto(spec.to_proto()) == spec.model_copy(update={"targets": ()})


def test_sources_are_all_that_an_engine_is_made_from(tmp_path):
    assert load(tmp_path, EVERYTHING).sources == {
        "source": "hf://owner/name",
        "calibration.data": "my-samples.txt",
        "speculation.source": "hf://owner/heads",
        "lora[0].source": "hf://owner/law",
        "lora[1].source": "s3://bucket/tax",
    }
    assert ModelFile(model="m", kind="fake", calibration={}).sources == {}


def test_absent_sections_stay_absent_and_empty_ones_empty():
    spec = ModelFile(model="m", kind="fake", serving={})

    read = ModelFile.from_proto(spec.to_proto())

    assert (read.serving, read.calibration, read.speculation) == (spec.serving, None, None)


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ("kind: openvino\n", 1, "model", "is required"),
        ("kind: openvino\n\nmodel: Upper\n", 3, "model", "a-z"),
        ("model: m\nkind: Open Vino\n", 2, "kind", "engine kind"),
        (
            "model: m\nkind: fake\nprecison: int8\n",
            3,
            "precison",
            "did you mean precision. there are model, kind",
        ),
        ("model: m\nkind: fake\nmax_batch_size: -1\n", 3, "max_batch_size", "greater than or equal to 0"),
        ("model: m\nkind: fake\nmax_batch_size: many\n", 3, "max_batch_size", "integer"),
        ("model: m\nkind: fake\noptions:\n  a: x\n  b: [1]\n", 5, "options.b", "string"),
        ("model: m\nkind: fake\noptions:\n  Bad: x\n", 3, "options", "option names"),
        ("model: m\nkind: fake\nmodel: n\n", 3, "model", "second time, first in line 1"),
        ("model: m\nkind: [fake\n", 3, "", "not YAML"),
        ("- model\n", 1, "", "must hold fields"),
        ("", 1, "", "must hold fields"),
        ("a: &a\n  b: *a\n", 1, "a", "no such field"),
        ("modle: m\nkind: fake\n", 1, "modle", "did you mean model"),
        ("model: m\nkind: fak\n", 2, "kind", "no engine kind 'fak'; did you mean fake"),
        ("model: m\nkind: openvino\n", 1, "source", "is required for kind openvino"),
        ("model: m\nkind: fake\nlora:\n- name: a\n  source: x\n- name: b\n", 6, "lora[1].source", "required"),
        ("model: m\nkind: fake\nlora:\n- name: a\n  rank: x\n", 5, "lora[0].rank", "no such field"),
        (
            "model: m\nkind: fake\ncalibration:\n  sample: 5\n",
            4,
            "calibration.sample",
            "did you mean samples. there are data, samples, seq_len",
        ),
        ("model: m\nkind: fake\nserving:\n  max_waiting_s: -1\n", 4, "serving.max_waiting_s", "equal to 0"),
        ("model: m\nkind: fake\nspeculation:\n  method: guess\n", 4, "speculation.method", "draft_model"),
        ("model: m\nkind: fake\ntargets:\n- cpu-x\n- 5\n", 5, "targets[1]", "must be a target"),
        ("model: m\nkind: fake\ntargets: cpu-x\n", 3, "targets", "tuple"),
        ("model: m\nkind: fake\nserving:\n  a:\n    b: 1\n    b: 2\n", 6, "serving.a.b", "second time"),
    ],
)
def test_fault_names_line_and_field(tmp_path, text, line, field, words):
    with pytest.raises(ModelFileError, match=words) as caught:
        load(tmp_path, text)

    assert (caught.value.line, caught.value.field) == (line, field)
    assert str(caught.value).startswith(f"{tmp_path}/model.yaml:{line}: ")


def test_tags_are_not_executed(tmp_path):
    marker = tmp_path / "executed"

    with pytest.raises(ModelFileError, match="not YAML"):
        load(tmp_path, f"model: !!python/object/apply:os.mkdir [{marker}]\nkind: fake\n")

    assert not marker.exists()


def test_too_large_file_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=str(FILE_LIMIT_BYTES)):
        load(tmp_path, "#" * (FILE_LIMIT_BYTES + 1))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_bytes(b"model: \xff\xfe\n")

    with pytest.raises(ModelFileError, match="not YAML"):
        ModelFile.load(path)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"kind": "fake"}, "spec.model"),
        ({"model": "m"}, "spec.kind"),
        ({"model": "m", "kind": "fake", "source": "x" * 1025}, "spec.source"),
        ({"model": "m", "kind": "fake", "precision": "../x"}, "spec.precision"),
        ({"model": "m", "kind": "fake", "precision": "int8"}, "spec.precision"),
        ({"model": "m", "kind": "other"}, "spec.kind"),
        ({"model": "m", "kind": "fake", "lora": [{"name": "a", "source": "x"}, {}]}, "spec.lora[1].name"),
        ({"model": "m", "kind": "fake", "lora": [{"name": "a", "source": "x"}]}, "spec.lora[0]"),
        ({"model": "m", "kind": "fake", "max_seq_len": 1 << 30}, "spec.max_seq_len"),
        ({"model": "m", "kind": "fake", "options": {str(i): "" for i in range(3)}}, "spec.options"),
        ({"model": "m", "kind": "fake", "options": {f"o{i}": "" for i in range(65)}}, "spec.options"),
    ],
)
def test_request_fault_names_field(spec, field):
    with pytest.raises(InvalidFieldError) as caught:
        ModelFile.from_proto(builds_pb2.ModelSpec(**spec))

    assert caught.value.field == field


def test_aliases_that_would_unfold_without_end_cost_nothing(tmp_path):
    levels = ["a0: &a0 [" + "x," * 500 + "]"]
    levels += [f"a{n}: &a{n} [" + f"*a{n - 1}," * 500 + "]" for n in range(1, 8)]

    with pytest.raises(ModelFileError, match="no such field"):
        load(tmp_path, "\n".join(levels))


def test_deep_nesting_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="nested too deeply"):
        load(tmp_path, "model: " + "[" * 5000 + "]" * 5000)
