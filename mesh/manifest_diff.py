"""What differs between two engines, and which part of the build key made them differ."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.manifest import KeyParts, Manifest

ABSENT = ""
_SHOWN_ELSEWHERE = ("files", "build_key", "key_parts")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs: its dotted name, and its values as JSON; ABSENT where there is none."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file that differs: its path, and its size in bytes in either engine; None where there is none."""

    path: str
    first: int | None
    second: int | None


@dataclass(frozen=True)
class ManifestDiff:
    """What differs between two engines.

    Attributes:
        is_same_key: Whether they are of one build key.
        has_key_parts: Whether both say what their key was made of; else `key` is empty.
        key: Parts of the build key that differ, such as "source", "spec.precision", "versions.openvino".
        fields: Other fields of the manifest that differ.
        files: Files that differ.
        shared_files: Files whose content both have, wherever it lies.
        shared_bytes: Bytes of these, which the store holds once.
    """

    is_same_key: bool
    has_key_parts: bool
    key: tuple[Difference, ...]
    fields: tuple[Difference, ...]
    files: tuple[FileDifference, ...]
    shared_files: int
    shared_bytes: int


def diff_manifests(first: Manifest, second: Manifest) -> ManifestDiff:
    """Compares two engines."""
    parts = (first.key_parts, second.key_parts)
    blobs = {file.sha256: file.size for file in first.files}
    shared = {file.sha256 for file in second.files} & blobs.keys()
    return ManifestDiff(
        is_same_key=first.build_key == second.build_key,
        has_key_parts=None not in parts,
        key=_differences(*map(_flat_parts, parts)) if None not in parts else (),
        fields=_differences(_flat_fields(first), _flat_fields(second)),
        files=_file_differences(first, second),
        shared_files=len(shared),
        shared_bytes=sum(blobs[sha256] for sha256 in shared),
    )


def _file_differences(first: Manifest, second: Manifest) -> tuple[FileDifference, ...]:
    digests, sizes = [], []
    for manifest in (first, second):
        digests.append({file.path: file.sha256 for file in manifest.files})
        sizes.append({file.path: file.size for file in manifest.files})
    return tuple(
        FileDifference(path, sizes[0].get(path), sizes[1].get(path))
        for path in sorted(digests[0].keys() | digests[1].keys())
        if digests[0].get(path) != digests[1].get(path)
    )


def _flat_parts(parts: KeyParts | None) -> dict[str, str]:
    return _flat("", parts.model_dump(mode="json")) if parts is not None else {}


def _flat_fields(manifest: Manifest) -> dict[str, str]:
    fields = json.loads(manifest.to_bytes())
    return _flat("", {name: value for name, value in fields.items() if name not in _SHOWN_ELSEWHERE})


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(f"{prefix}{name}.", value)
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False)
    return flat


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name, first.get(name, ABSENT), second.get(name, ABSENT))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    )
