"""From a folder of files to an engine: its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.engine_files import list_files
from mesh.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from build_worker.backends.base import EngineTraits
    from mesh.model_file import ModelFile
    from mesh.target import Target


def make_manifest(
    folder: Path,
    spec: ModelFile,
    target: Target,
    *,
    build_key: str,
    versions: Mapping[str, str],
    traits: EngineTraits,
) -> Manifest:
    """The manifest of the engine whose files lie in `folder`; `versions` are those that its runner needs."""
    return Manifest(
        model=spec.model,
        kind=spec.kind,
        target=target,
        precision=traits.precision,
        build_key=build_key,
        versions=dict(versions),
        max_batch_size=traits.max_batch_size,
        max_input_len=spec.max_input_len or None,
        max_seq_len=traits.max_seq_len,
        max_num_tokens=traits.max_num_tokens,
        kv_bytes_per_token=traits.kv_bytes_per_token,
        tokenizer=traits.tokenizer,
        capabilities=tuple(sorted(traits.capabilities)),
        options=traits.options,
        files=list_files(folder),
    )
