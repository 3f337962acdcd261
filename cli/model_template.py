"""A commented model file, written from what the fields and the kinds say of themselves.

Lines of prose begin with "# "; lines that begin with "#" alone are YAML that takes effect without it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from mesh.kinds import KINDS
from mesh.manifest import MODEL_NAME
from mesh.model_fields import ServingSettings
from mesh.model_file import ModelFile
from mesh.model_schema import PATH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.kinds import Kind
    from mesh.model_shape import ModelShape

SUGGESTED_SEQ_LEN = 8192
WIDTH = 100
DEFAULT_NAME = "my-model"
F16_BYTES = 2
NEEDS_SOURCE = ("draft_model", "medusa", "eagle")

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
    blocks = [
        f"# yaml-language-server: $schema={PATH}",
        _prose(
            f"{shape.parameters / 1e9:.2f} billion weights in {shape.layers} layers. Lines that begin with "
            f"# and no space are examples; all that is not set has the kind's or the model's default."
        ),
        _block("model", name),
        _block("kind", kind_name, "; ".join(f"{one.name}: {one.meaning}" for one in KINDS.values())),
        _block("source", source),
        _block("precision", kind.default_precision, _choices(kind.precisions)),
        _block("max_seq_len", length, _lengths(shape)),
        *(_example(field, value, more) for field, value, more in _examples(kind, length)),
    ]
    return "\n\n".join(blocks) + "\n"


def _examples(kind: Kind, length: int) -> Iterator[tuple[str, Any, str]]:
    """Field, value and what is to be said besides of its description."""
    yield "targets", _targets(kind), ""
    if kind.kv_cache_precisions:
        name = next(iter(kind.kv_cache_precisions))
        yield "kv_cache_precision", name, _choices(kind.kv_cache_precisions)
    if kind.default_precision in kind.calibrated:
        yield "calibration", {"data": "builtin", "samples": 512, "seq_len": 512}, ""
    yield "max_batch_size", 64, ""
    yield "max_input_len", length * 3 // 4, ""
    yield "max_num_tokens", 8192, ""
    if kind.max_tensor_parallel > 1:
        yield "tensor_parallel", 1, ""
        yield "pipeline_parallel", 1, ""
    if kind.speculation:
        yield "speculation", _speculation(kind.speculation[-1]), f"Methods: {', '.join(kind.speculation)}"
    if kind.max_lora:
        adapter = {"name": "my-adapter", "source": "hf://owner/name"}
        yield "lora", [adapter], f"At most {kind.max_lora}"
    options = {
        name: yaml.safe_load(option.default) for name, option in kind.options.items() if option.default
    }
    if options:
        meanings = "; ".join(f"{name}: {kind.options[name].meaning}" for name in options)
        yield "options", options, meanings
    yield "serving", _serving(length), _choices(_meanings_of_serving())


def _targets(kind: Kind) -> list[str]:
    cpus, gpus = ["cpu-x86_64-avx2", "cpu-x86_64-avx512"], ["h100-sxm-80gb", "h100-sxm-80gb:mig-3g.40gb"]
    return gpus if kind.device == "gpu" else cpus


def _speculation(method: str) -> dict[str, Any]:
    if method in NEEDS_SOURCE:
        return {"method": method, "source": "hf://owner/name", "tokens": 4}
    return {"method": method, "ngram_size": 3}


def _serving(length: int) -> dict[str, Any]:
    return {
        "max_waiting_requests": 1000,
        "max_waiting_tokens": 1_000_000,
        "max_waiting_s": 30,
        "default_max_tokens": min(1024, length),
        "min_workers": 0,
        "max_workers": 4,
        "scale_down_after_s": 300,
    }


def _meanings_of_serving() -> dict[str, str]:
    fields = ServingSettings.model_fields
    return {name: field.description or "" for name, field in fields.items()}


def _lengths(shape: ModelShape) -> str:
    kib = 2 * shape.layers * shape.kv_width * F16_BYTES / 1024
    return f"The model takes {shape.context_length}; a token costs {kib:g} KiB of KV cache in half precision"


def _choices(meanings: Any) -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in meanings.items())


def _block(field: str, value: Any, more: str = "") -> str:
    said = [ModelFile.model_fields[field].description or "", more]
    return "\n".join([*(_prose(f"{text}.") for text in said if text), _yaml(field, value)])


def _example(field: str, value: Any, more: str) -> str:
    text = _block(field, value, more)
    return "\n".join(line if line.startswith("# ") else f"#{line}" for line in text.splitlines())


def _yaml(field: str, value: Any) -> str:
    flow = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return yaml.safe_dump(
        {field: value}, sort_keys=False, default_flow_style=None if flow else False
    ).rstrip()


def _prose(text: str) -> str:
    """Comment lines of bounded width."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("")
        lines[-1] += f" {word}"
    return "\n".join(f"#{line}" for line in lines)
