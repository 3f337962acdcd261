"""The JSON schema of model files, for editors: `python -m mesh.model_schema` writes model_schema.json.

What the fields are comes from mesh.model_file, what each kind can do from mesh.kinds. Rules between fields
that a schema can't express are checked when a file is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.gpus import target_names
from mesh.kinds import KINDS
from mesh.model_file import ModelFile

if TYPE_CHECKING:
    from mesh.kinds import Kind, Option

PATH = Path(__file__).with_suffix(".json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"

_JSON_TYPES = {"boolean": "boolean", "integer": "integer", "number": "number", "text": "string"}


def schema() -> dict[str, Any]:
    """The whole schema."""
    made = _without_titles(ModelFile.model_json_schema())
    made["properties"]["kind"] |= {"enum": list(KINDS)}
    made["properties"]["targets"]["items"] |= {"examples": [*target_names(), "cpu-x86_64-avx512"]}
    made["properties"]["options"]["additionalProperties"] = {"type": ["string", "number", "boolean"]}
    return {
        "$schema": DIALECT,
        "title": "EngineMesh model file",
        **made,
        "allOf": [_of_kind(kind) for kind in KINDS.values()],
    }


def render() -> str:
    """The schema as the text of its file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _of_kind(kind: Kind) -> dict[str, Any]:
    precisions = ["", *kind.precisions]
    properties: dict[str, Any] = {
        "precision": {"enum": precisions, "description": _list(kind.precisions)},
        "kv_cache_precision": {
            "enum": ["", *kind.kv_cache_precisions],
            "description": _list(kind.kv_cache_precisions),
        },
        "tensor_parallel": {"maximum": kind.max_tensor_parallel},
        "pipeline_parallel": {"maximum": kind.max_pipeline_parallel},
        "lora": {"maxItems": kind.max_lora},
        "options": {
            "properties": {name: _of_option(option) for name, option in kind.options.items()},
            "additionalProperties": False,
        },
    }
    if kind.speculation:
        method = {"enum": list(kind.speculation)}
        properties["speculation"] = {"properties": {"method": method, "precision": {"enum": precisions}}}
    else:
        properties["speculation"] = {"type": "null"}
    if not kind.calibrated:
        properties["calibration"] = {"type": "null"}
    return {
        "if": {"properties": {"kind": {"const": kind.name}}, "required": ["kind"]},
        "then": {"properties": properties, "required": ["source"] if kind.needs_source else []},
    }


def _of_option(option: Option) -> dict[str, Any]:
    made: dict[str, Any] = {"description": option.meaning}
    if option.type == "choice":
        made["enum"] = list(option.choices)
    else:
        made["type"] = _JSON_TYPES[option.type]
    if option.type in ("integer", "number"):
        made |= {"minimum": option.low, "maximum": option.high}
    if option.default:
        made["default"] = option.default if option.type in ("choice", "text") else json.loads(option.default)
    return made


def _list(meanings: Any) -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in meanings.items()) or "none for this kind"


def _without_titles(node: Any) -> Any:
    """A schema without pydantic's titles, which say no more than the names."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
