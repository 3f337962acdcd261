"""Engines of a few bytes for tests."""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING

from mesh.manifest import EngineFile, Manifest, TokenizerInfo
from mesh.target import Target

if TYPE_CHECKING:
    from pathlib import Path

TARGET = Target(device_type="cpu", device_name="a CPU", architecture="x86_64", instruction_set="avx2")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(files: dict[str, bytes] | None = None, **fields) -> Manifest:
    """A manifest that names these files; every call has a build key of its own."""
    files = {"tokenizer.json": b"{}"} if files is None else files
    defaults = {
        "model": "m",
        "kind": "fake",
        "target": TARGET,
        "precision": "int8",
        "build_key": sha256(uuid.uuid4().bytes),
        "versions": {},
        "max_batch_size": 4,
        "max_seq_len": 128,
        "max_num_tokens": 64,
        "tokenizer": TokenizerInfo(vocab_size=256),
        "files": entries(files),
    }
    return Manifest(**(defaults | fields))


def entries(files: dict[str, bytes]) -> tuple[EngineFile, ...]:
    """What a manifest says of these files."""
    return tuple(EngineFile(path=p, size=len(data), sha256=sha256(data)) for p, data in files.items())


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Puts an engine's files where they belong in a folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder
