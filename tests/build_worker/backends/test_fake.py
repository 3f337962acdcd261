"""Kind `fake`: what its engines consist of."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from build_worker.backends.fake import FakeBuilder
from infer_worker.backends.fake import FakeBackend, read_script
from mesh.errors import InvalidFieldError
from mesh.model_file import ModelFile
from tests.build_worker.helpers import build

SPEC = ModelFile(
    model="m", kind="fake", max_batch_size=3, options={"step_ms": "2.5", "slots": "2", "text": "hé"}
)


async def test_engine_is_what_its_runner_reads(tmp_path):
    manifest = await build(tmp_path, SPEC, tmp_path)
    script = read_script(tmp_path / "engine", manifest)

    assert (script.step_ms, script.slots) == (2.5, 2)
    assert script.answer == ((104,), (195,), (169,))
    assert manifest.versions == FakeBackend.versions()
    assert manifest.max_batch_size == 3


async def test_tokenizer_has_a_token_per_byte(tmp_path):
    manifest = await build(tmp_path, SPEC, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "engine" / manifest.tokenizer.file))
    text = "a\x00\nß 😀<|im_end|>"

    ids = tokenizer.encode(text).ids

    assert ids == [*"a\x00\nß 😀".encode(), *manifest.tokenizer.eos_token_ids]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a\x00\nß 😀"
    assert tokenizer.get_vocab_size() == manifest.tokenizer.vocab_size


async def test_same_build_gives_same_engine_and_another_text_another(tmp_path):
    first = await build(tmp_path / "1", SPEC, tmp_path)
    second = await build(tmp_path / "2", SPEC, tmp_path)
    other = await build(tmp_path / "3", SPEC.model_copy(update={"options": {}}), tmp_path)

    assert first.digest == second.digest
    assert other.digest != first.digest
    assert json.loads((tmp_path / "3" / "engine" / "script.json").read_text()) == {}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"precision": "int8"}, "spec.precision"),
        ({"options": {"colour": "red"}}, "spec.options.colour"),
        ({"options": {"step_ms": "soon"}}, "spec.options.step_ms"),
        ({"options": {"step_ms": "-1"}}, "spec.options.step_ms"),
        ({"options": {"step_ms": "nan"}}, "spec.options.step_ms"),
    ],
)
def test_what_the_kind_cannot_do_is_refused(fields, field):
    with pytest.raises(InvalidFieldError) as caught:
        FakeBuilder().validate(ModelFile(model="m", kind="fake", **fields))

    assert caught.value.field == field
