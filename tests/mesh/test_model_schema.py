"""The published JSON schema of model files is what the files are checked by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh import model_schema
from mesh.kinds import KINDS
from mesh.model_file import ModelFile

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def of_kind(name):
    return next(
        rule["then"]
        for rule in model_schema.schema()["allOf"]
        if rule["if"]["properties"]["kind"] == {"const": name}
    )


def test_published_schema_is_up_to_date():
    assert model_schema.PATH.read_text(encoding="utf-8") == model_schema.render(), "run `make docs`"


def test_schema_has_every_field_with_its_meaning():
    published = json.loads(model_schema.PATH.read_text(encoding="utf-8"))

    assert set(published["properties"]) == set(ModelFile.model_fields)
    sections = [published, *published["$defs"].values()]
    assert all(field["description"] for section in sections for field in section["properties"].values())
    assert not any(section["additionalProperties"] for section in sections)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_schema_of_a_kind_has_what_the_kind_can_do(kind):
    rules = of_kind(kind.name)
    properties = rules["properties"]

    assert properties["precision"]["enum"] == ["", *kind.precisions]
    assert properties["lora"] == {"maxItems": kind.max_lora}
    assert set(properties["options"]["properties"]) == set(kind.options)
    assert ("source" in rules["required"]) == kind.needs_source
    assert (properties["speculation"] == {"type": "null"}) == (not kind.speculation)


def test_options_have_their_types():
    options = of_kind("tensorrt_llm")["properties"]["options"]["properties"]

    assert options["reduce_fusion"]["type"] == "boolean"
    assert options["reduce_fusion"]["default"] is False
    assert (options["tokens_per_block"]["type"], options["tokens_per_block"]["minimum"]) == ("integer", 1)
    assert options["capacity_scheduler_policy"]["enum"][0] == "GUARANTEED_NO_EVICT"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_name_the_schema_for_editors(path):
    prefix, _, place = path.read_text().splitlines()[0].partition("$schema=")

    assert prefix == "# yaml-language-server: "
    assert (path.parent / place).resolve() == model_schema.PATH
