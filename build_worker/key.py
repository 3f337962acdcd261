"""The key of a build: equal keys, equal engines."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mesh.manifest import canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.model_file import ModelFile
    from mesh.target import Target


def build_key(source_digest: str, spec: ModelFile, target: Target, versions: Mapping[str, str]) -> str:
    """The sha256, in hex, of everything that the engine's bytes depend on.

    The weights count by their content, wherever they were read from. The target counts by its key, as it
    does in the policy "exact": hosts that differ in nothing else share engines.
    """
    return hashlib.sha256(
        canonical_json(
            {
                "source": source_digest,
                "spec": spec.model_dump(exclude={"source"}),
                "target": target.key,
                "versions": dict(versions),
            }
        )
    ).hexdigest()
