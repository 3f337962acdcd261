"""Writes docs/settings.md from mesh/settings.py: `make docs`."""

# ruff: noqa: INP001 -- a program, not part of a package

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import SecretStr

from mesh import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """\
# Settings

Made from `mesh/settings.py` by `make docs`; a test checks that it is up to date.

Every setting is an environment variable, read when a process starts. OpenTelemetry's own variables keep
their standard names: with `OTEL_EXPORTER_OTLP_ENDPOINT` set, traces and metrics go there by OTLP over gRPC;
without it, traces go to `<ENGINEMESH_DATA_DIR>/traces`, where `enginemesh trace` reads them.
"""

GROUPS: tuple[tuple[str, type[settings.MeshSettings]], ...] = (
    ("Every process", settings.MeshSettings),
    ("Command line", settings.ClientSettings),
    ("Gateway", settings.GatewaySettings),
    ("Inference and build workers", settings.WorkerSettings),
    ("Inference worker", settings.InferWorkerSettings),
    ("Build worker", settings.BuildWorkerSettings),
)


def render() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n## {title}\n\n{_table(group)}" for title, group in GROUPS)


def _table(group: type[settings.MeshSettings]) -> str:
    inherited = {name for base in group.__mro__[1:] for name in getattr(base, "model_fields", {})}
    own = {name: field for name, field in group.model_fields.items() if name not in inherited}
    lines = ["| variable | meaning | default |", "| --- | --- | --- |"]
    lines += [
        f"| `ENGINEMESH_{name.upper()}` | {_meaning(field)} | {_default(field)} |"
        for name, field in own.items()
    ]
    return "\n".join(lines) + "\n"


def _meaning(field: FieldInfo) -> str:
    choices = list(_choices(field.annotation))
    suffix = f": {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
    return f"{field.description or ''}{suffix}"


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "made when the process starts"
    value = field.default
    text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    return f"`{text}`" if text else "none"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
