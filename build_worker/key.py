"""The key of a build: equal keys, equal engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh.manifest import KeyParts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.model_file import ModelFile
    from mesh.target import Target

PLACES: dict[str, Any] = {
    "source": True,
    "calibration": {"data"},
    "speculation": {"source"},
    "lora": {"__all__": {"source"}},
}
"""Fields that say where something is; what is there counts in their stead."""

NOT_IN_ENGINE: dict[str, Any] = {"targets": True, "serving": True}


def key_parts(
    source_digest: str,
    spec: ModelFile,
    target: Target,
    versions: Mapping[str, str],
    more_digests: Mapping[str, str] | None = None,
) -> KeyParts:
    """Everything that the engine's bytes depend on.

    The weights count by their content, wherever they were read from. The target counts by its key, as it
    does in the policy "exact": hosts that differ in nothing else share engines. Fields that have their
    default are left out, so that the key does not change when model files gain fields.

    Args:
        source_digest: Of the model.
        spec: What is asked for.
        target: For what.
        versions: Of the tools.
        more_digests: Of the other `spec.sources`, by their dotted fields.

    Raises:
        ValueError: the digest of a source is missing, or there is one of what is no source.
    """
    digests = dict(more_digests or {})
    if {*digests, "source"} != {*spec.sources, "source"}:
        raise ValueError(f"digests of {sorted(digests)}, sources {sorted(spec.sources)}")
    asked = spec.model_dump(mode="json", exclude={**PLACES, **NOT_IN_ENGINE}, exclude_defaults=True)
    return KeyParts(
        source=source_digest,
        spec={**asked, "sources": digests} if digests else asked,
        target=target.key,
        versions=dict(versions),
    )


def build_key(
    source_digest: str,
    spec: ModelFile,
    target: Target,
    versions: Mapping[str, str],
    more_digests: Mapping[str, str] | None = None,
) -> str:
    """The sha256, in hex, of these parts."""
    return key_parts(source_digest, spec, target, versions, more_digests).key
