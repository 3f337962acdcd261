"""The key of a build: equal keys, equal engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.manifest import KeyParts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.model_file import ModelFile
    from mesh.target import Target


def key_parts(source_digest: str, spec: ModelFile, target: Target, versions: Mapping[str, str]) -> KeyParts:
    """Everything that the engine's bytes depend on.

    The weights count by their content, wherever they were read from. The target counts by its key, as it
    does in the policy "exact": hosts that differ in nothing else share engines.
    """
    return KeyParts(
        source=source_digest,
        spec=spec.model_dump(mode="json", exclude={"source"}),
        target=target.key,
        versions=dict(versions),
    )


def build_key(source_digest: str, spec: ModelFile, target: Target, versions: Mapping[str, str]) -> str:
    """The sha256, in hex, of these parts."""
    return key_parts(source_digest, spec, target, versions).key
