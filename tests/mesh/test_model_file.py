"""Model files: what is read, what is refused, and how the refusal helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginemesh.v1 import builds_pb2
from mesh.errors import InvalidFieldError
from mesh.model_file import FILE_LIMIT_BYTES, ModelFile, ModelFileError

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def load(tmp_path, text):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return ModelFile.load(path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_example_loads(path):
    spec = ModelFile.load(path)

    assert ModelFile.from_proto(spec.to_proto()) == spec


def test_values_are_read(tmp_path):
    spec = load(
        tmp_path,
        "model: a.b-1\nkind: openvino\nsource: s3://b/p\nmax_seq_len: 4096\n"
        "options: {profile: exact, step_ms: 2.5, loud: true}\n",
    )

    assert (spec.model, spec.kind, spec.source, spec.max_seq_len) == ("a.b-1", "openvino", "s3://b/p", 4096)
    assert spec.options == {"profile": "exact", "step_ms": "2.5", "loud": "true"}


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ("kind: openvino\n", 1, "model", "is required"),
        ("kind: openvino\n\nmodel: Upper\n", 3, "model", "a-z"),
        ("model: m\nkind: Open Vino\n", 2, "kind", "engine kind"),
        ("model: m\nkind: fake\nprecison: int8\n", 3, "precison", "no such field; there are model, kind"),
        ("model: m\nkind: fake\nmax_batch_size: -1\n", 3, "max_batch_size", "greater than or equal to 0"),
        ("model: m\nkind: fake\nmax_batch_size: many\n", 3, "max_batch_size", "integer"),
        ("model: m\nkind: fake\noptions:\n  a: x\n  b: [1]\n", 5, "options.b", "string"),
        ("model: m\nkind: fake\noptions:\n  Bad: x\n", 3, "options", "option names"),
        ("model: m\nkind: fake\nmodel: n\n", 3, "model", "second time, first in line 1"),
        ("model: m\nkind: [fake\n", 3, "", "not YAML"),
        ("- model\n", 1, "", "must hold fields"),
        ("", 1, "", "must hold fields"),
        ("a: &a\n  b: *a\n", 1, "model", "is required"),
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
        ({"model": "m", "kind": "fake", "max_seq_len": 1 << 30}, "spec.max_seq_len"),
        ({"model": "m", "kind": "fake", "options": {str(i): "" for i in range(3)}}, "spec.options"),
        ({"model": "m", "kind": "fake", "options": {f"o{i}": "" for i in range(65)}}, "spec.options"),
    ],
)
def test_request_fault_names_field(spec, field):
    with pytest.raises(InvalidFieldError) as caught:
        ModelFile.from_proto(builds_pb2.ModelSpec(**spec))

    assert caught.value.field == field
