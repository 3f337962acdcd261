"""Writes docs/model-file.md from what model files and engine kinds say of themselves: `make docs`."""

# ruff: noqa: INP001 -- a program, not part of a package

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mesh.kinds import KINDS
from mesh.model_fields import Calibration, LoraAdapter, Section, ServingSettings, Speculation
from mesh.model_file import ModelFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.kinds import Kind, Option

PAGE = Path(__file__).parents[1] / "docs" / "model-file.md"

HEAD = """\
# The model file

Made by `make docs` from `mesh/model_file.py` and `mesh/kinds.py`; a test checks that it is up to date.

One YAML file says what to build of a model, for which hardware, and how it is served.
[examples/models](../examples/models) holds some, from SmolLM2 to a 70B on four GPUs.

```sh
enginemesh init ./TinyLlama-1.1B-Chat > tinyllama.yaml   # a commented file for a model on this machine
enginemesh build tinyllama.yaml --check                  # only says whether it is right
enginemesh build tinyllama.yaml                          # an engine for each of its targets
```

Command line and gateway check it by the same rules, and what an engine kind cannot do is refused at once:
`tinyllama.yaml:9: speculation.method: kind openvino cannot do medusa, only draft_model, prompt_lookup`.

A first line `# yaml-language-server: $schema=<path>/mesh/model_schema.json` lets editors complete and check
it by the [JSON schema](../mesh/model_schema.json).

## What makes another engine

A build's key is the digest of the target, of the versions of all tools, of the *content* of every source
(weights, draft model, adapters, calibration data; wherever they lie), and of all fields except `source`,
`targets` and `serving`. The same key is built once.

`serving` is kept for the model, not for an engine: `enginemesh build` with a changed `serving` takes effect
without a build, and a file without it leaves what is kept as it is. Its limits on what waits hold in each
gateway process, beside the gateway's own settings; the stricter one counts. A request is refused with
RESOURCE_EXHAUSTED if there is no room for it, if it would wait longer than `max_waiting_s` by the rate
measured, or when it has waited that long without a worker that takes it.

`max_input_len` is held by the gateways: a request that goes on after the loss of its worker has its answer so
far in its prompt, and may be longer.

## Fields

Everything but `model`, `kind`, and for most kinds `source`, may be left out: 0, "" or nothing is the default.
"""

SECTIONS: Mapping[str, type[Section]] = {
    "calibration": Calibration,
    "speculation": Speculation,
    "lora[]": LoraAdapter,
    "serving": ServingSettings,
}
METHODS = """
| method | needs `source` | takes `tokens` | takes `ngram_size` |
| --- | --- | --- | --- |
| `draft_model`, `medusa`, `eagle` | yes, and may have `precision` | yes | no |
| `prompt_lookup` | no | yes | yes |
| `lookahead` | no | no | yes |
"""


def render() -> str:
    """The whole page."""
    rows = _fields("", ModelFile)
    for name, section in SECTIONS.items():
        rows += _fields(f"{name}.", section)
    kinds = "".join(_kind(kind) for kind in KINDS.values())
    return f"{HEAD}\n{_table(('field', 'meaning'), rows)}{METHODS}\n## Kinds\n{kinds}"


def _fields(prefix: str, section: type[Section]) -> list[tuple[str, ...]]:
    """A row for each field; those that are sections have rows of their own."""
    return [
        (f"`{prefix}{name}`", field.description or "")
        for name, field in section.model_fields.items()
        if name not in SECTIONS and f"{name}[]" not in SECTIONS
    ]


def _kind(kind: Kind) -> str:
    devices = {"cpu": "CPUs", "gpu": "GPUs", "any": "CPUs and GPUs"}
    rows = [
        ("targets", devices[kind.device]),
        ("precision", _choices(kind.precisions, kind.calibrated)),
        ("kv_cache_precision", _choices(kind.kv_cache_precisions)),
        ("speculation", ", ".join(f"`{name}`" for name in kind.speculation) or "none"),
        ("lora", f"{kind.max_lora} at most" if kind.max_lora else "none"),
        ("parallel", f"tensor {kind.max_tensor_parallel}, pipeline {kind.max_pipeline_parallel} at most"),
    ]
    options = [(f"`{name}`", _values(option), option.meaning) for name, option in kind.options.items()]
    head = f"### {kind.name}\n\nThis is {kind.meaning}."
    able = _table(("field", "what it may be"), rows)
    return f"\n{head}\n\n{able}\n{_table(('option', 'type, default', 'meaning'), options)}"


def _choices(meanings: Mapping[str, str], calibrated: frozenset[str] = frozenset()) -> str:
    """The names with their meanings; the first is the default of weights."""
    named = [
        f"`{name}` ({meaning}{'; calibrated' if name in calibrated else ''})"
        for name, meaning in meanings.items()
    ]
    return ", ".join(named) or "none"


def _values(option: Option) -> str:
    kind = " ".join(f"`{choice}`" for choice in option.choices) or option.type
    return f"{kind}, `{option.default}`" if option.default else kind


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
