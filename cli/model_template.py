"""A commented model file, written from what the fields and the kinds say of themselves.

Lines of prose begin with "##"; what stands behind one "# " is YAML that takes effect without it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import yaml

from mesh.kinds import KINDS
from mesh.manifest import MODEL_NAME
from mesh.model_fields import Calibration, ServingSettings, Speculation
from mesh.model_file import ModelFile
from mesh.model_rules import NEEDS_SOURCE
from mesh.model_schema import PATH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

    from mesh.kinds import Kind
    from mesh.model_shape import ModelShape

SUGGESTED_SEQ_LEN = 8192
SUGGESTED_TOKENS = 1024
WIDTH = 100
DEFAULT_NAME = "my-model"
F16_BYTES = 2
PLACE = "hf://owner/name"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"

_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]+")
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|f16|f32|bf16)$")


def model_name(file_name: str) -> str:
    """A name for clients to ask for, after a folder or a GGUF file without its suffix."""
    lower = _QUANTISATION.sub("", file_name.lower())
    name = re.sub(r"[^a-z0-9.]+", "-", lower)[:63].strip(".-")
    return name if MODEL_NAME.fullmatch(name) else DEFAULT_NAME


def render(name: str, kind_name: str, source: str, shape: ModelShape) -> str:
    """The text of a model file.

    Args:
        name: The model.
        kind_name: Who shall run it; one of KINDS.
        source: Where the weights are.
        shape: What is known of it.
    """
    kind = KINDS[kind_name]
    length = min(shape.context_length, SUGGESTED_SEQ_LEN)
    cost = 2 * shape.layers * shape.kv_width * F16_BYTES / 1024
    blocks = [
        f"# yaml-language-server: $schema={PATH}",
        _prose(
            f"{shape.parameters / 1e9:.2f} billion weights in {shape.layers} layers; sequences of "
            f"{shape.context_length} tokens at most, each token with {cost:g} KiB of KV cache in half "
            "precision. Lines that begin with a single # are examples: what is not set has the default of "
            "its kind or model."
        ),
        _block("model", name),
        _block("kind", kind_name, {one.name: one.meaning for one in KINDS.values()}),
        _block("source", source),
        _block("precision", kind.default_precision, kind.precisions),
        _block("max_seq_len", length),
        *(_commented(block) for block in _examples(kind, length)),
    ]
    return "\n\n".join(blocks) + "\n"


def _examples(kind: Kind, length: int) -> Iterator[str]:
    """A block for each other field that the kind has."""
    gpus, cpus = ["h100-sxm-80gb", "l4"], ["cpu-x86_64-avx2", "cpu-x86_64-avx512"]
    yield _block("targets", gpus if kind.device == "gpu" else cpus)
    if kind.kv_cache_precisions:
        yield _block("kv_cache_precision", next(iter(kind.kv_cache_precisions)), kind.kv_cache_precisions)
    if kind.default_precision in kind.calibrated:
        calibration = {"data": "builtin", "samples": 512, "seq_len": 512}
        yield _block("calibration", calibration, inside=_meanings(Calibration))
    yield _block("max_batch_size", 64)
    yield _block("max_input_len", length * 3 // 4)
    yield _block("max_num_tokens", 8192)
    if kind.max_tensor_parallel > 1:
        yield _block("tensor_parallel", 1)
        yield _block("pipeline_parallel", 1)
    if kind.speculation:
        methods = {"method": f"one of {', '.join(kind.speculation)}"}
        values = _speculation(kind.speculation[-1])
        yield _block("speculation", values, inside={**_meanings(Speculation), **methods})
    if kind.max_lora:
        yield _block("lora", [{"name": "my-adapter", "source": PLACE}])
    options = {
        name: yaml.safe_load(option.default) for name, option in kind.options.items() if option.default
    }
    if options:
        inside = {name: option.meaning for name, option in kind.options.items()}
        yield _block("options", options, inside=inside)
    yield _block("chat_template", TEMPLATE)
    yield _block("serving", _serving(length), inside=_meanings(ServingSettings))


def _speculation(method: str) -> dict[str, Any]:
    if method in NEEDS_SOURCE:
        return {"method": method, "source": PLACE, "tokens": 4}
    return {"method": method, "ngram_size": 3}


def _serving(length: int) -> dict[str, Any]:
    return {
        "max_waiting_requests": 1000,
        "max_waiting_tokens": 1_000_000,
        "max_waiting_s": 30,
        "default_max_tokens": min(SUGGESTED_TOKENS, length),
        "min_workers": 0,
        "max_workers": 4,
        "scale_down_after_s": 300,
    }


def _meanings(section: type[BaseModel]) -> dict[str, str]:
    return {name: field.description or "" for name, field in section.model_fields.items()}


def _block(
    field: str,
    value: Any,
    choices: Mapping[str, str] | None = None,
    *,
    inside: Mapping[str, str] | None = None,
) -> str:
    """A field with what it means.

    Args:
        field: Its name.
        value: What it is set to.
        choices: What else it may be, and what that means.
        inside: What the fields of a section mean.
    """
    comments = [_prose(f"{ModelFile.model_fields[field].description}.")]
    comments += [f"##   {name}: {meaning}" for name, meaning in (choices or {}).items()]
    if inside is None:
        return "\n".join([*comments, f"{field}: {_yaml(value)}"])
    lines = [f"  {name}: {_yaml(each)}  # {inside[name]}" for name, each in value.items()]
    return "\n".join([*comments, f"{field}:", *lines])


def _commented(block: str) -> str:
    return "\n".join(line if line.startswith("##") else f"# {line}" for line in block.splitlines())


def _yaml(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and yaml.safe_load(value) == value
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _prose(text: str) -> str:
    """Comment lines of bounded width."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("")
        lines[-1] += f" {word}"
    return "\n".join(f"##{line}" for line in lines)
