"""From a folder of files to an engine: its manifest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mesh.manifest import EngineFile, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from build_worker.backends.base import EngineTraits
    from mesh.model_file import ModelFile
    from mesh.target import Target

HASH_BYTES = 1 << 20


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


def list_files(folder: Path) -> tuple[EngineFile, ...]:
    """Every file below `folder` with its size and sha256, by path."""
    return tuple(
        EngineFile(path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )


def sha256_of(path: Path) -> str:
    """The digest of a file, in hex."""
    sha256 = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(HASH_BYTES):
            sha256.update(data)
    return sha256.hexdigest()
