"""The manifest: what an engine is, what it was made for, and which blobs it consists of.

Its canonical JSON names the engine: the engine's digest is the sha256 of those bytes. It holds no time
and no host name, so the same build made twice has the same digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import from_json
from typing_extensions import override

from mesh.errors import IntegrityError
from mesh.target import Target  # noqa: TC001 - pydantic needs it at run time

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
_LATER_FIELDS = ("key_parts", "max_input_len")
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def _stay_inside(path: str) -> str:
    """Refuses what could leave the folder that the path is joined to, or name one file in two ways."""
    if any(segment in {"", ".", ".."} for segment in path.split("/")):
        raise ValueError("must be a plain relative path without empty, '.' or '..' segments")
    return path


RelativePath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9._/ +-]{1,512}$"), AfterValidator(_stay_inside)
]
MODEL_NAME = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineFile(_Record):
    """One file of an engine: its place in the engine's folder, and the blob that holds it."""

    path: RelativePath
    size: int = Field(ge=0, description="bytes")
    sha256: Sha256


class TokenizerInfo(_Record):
    """What a gateway needs besides tokenizer.json to turn text into ids and back."""

    file: RelativePath = "tokenizer.json"
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = Field(gt=0)


class KeyParts(_Record):
    """What a build key was made of: everything that the engine's bytes depend on.

    Attributes:
        source: Digest of the source model's content, wherever it was read from.
        spec: What was asked for, as JSON values, without what does not change the engine.
        target: The target's key.
        versions: Of the tools that made it.
    """

    source: str
    spec: dict[str, Any]
    target: str
    versions: dict[str, str]

    @property
    def key(self) -> str:
        """The build key: sha256 of the canonical JSON, in hex."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json"))).hexdigest()


class Manifest(_Record):
    """An engine. Lengths are in tokens, sizes in bytes.

    `key_parts` say what `build_key` is the digest of; None if whoever published the engine did not say.
    """

    schema_version: int = SCHEMA_VERSION
    model: Annotated[str, StringConstraints(pattern=MODEL_NAME.pattern)]
    kind: str
    target: Target
    precision: str
    build_key: Sha256
    key_parts: KeyParts | None = None
    versions: dict[str, str]
    max_batch_size: int = Field(gt=0)
    max_input_len: int | None = Field(None, gt=0)
    max_seq_len: int = Field(gt=0)
    max_num_tokens: int = Field(gt=0)
    kv_bytes_per_token: int = Field(0, ge=0)
    tokenizer: TokenizerInfo
    capabilities: tuple[str, ...] = ()
    options: dict[str, str] = {}
    files: tuple[EngineFile, ...]

    @model_validator(mode="after")
    def _check_files(self) -> Manifest:
        paths = [file.path for file in self.files]
        folders = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
        if len(set(paths)) < len(paths) or folders & set(paths):
            raise ValueError("two files have the same path, or one is the other's folder")
        if self.tokenizer.file not in paths:
            raise ValueError(f"the tokenizer's file {self.tokenizer.file!r} is not among the files")
        return self

    @model_validator(mode="after")
    def _check_key(self) -> Manifest:
        if self.key_parts is not None and self.key_parts.key != self.build_key:
            raise ValueError("build_key is not the digest of key_parts")
        return self

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def digest(self) -> str:
        """The engine's name: sha256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @override
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Manifest:
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("digest", None)  # a changed manifest is another engine
        return copy

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, UTF-8."""
        # Fields that came after the first version are left out while unset, so that older engines keep
        # their names.
        unset = {name for name in _LATER_FIELDS if getattr(self, name) is None}
        return canonical_json(self.model_dump(mode="json", exclude=unset))

    def file(self, path: str) -> EngineFile:
        """The entry of one path; KeyError if there is none."""
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)

    @classmethod
    def from_bytes(cls, data: bytes, digest: str) -> Manifest:
        """Reads a manifest that was asked for by digest.

        Raises:
            IntegrityError: the bytes have another digest, or are no manifest of a known schema.
        """
        actual = hashlib.sha256(data).hexdigest()
        if actual != digest:
            raise IntegrityError("manifest has another digest", expected=digest, actual=actual)
        try:
            version = from_json(data)["schema_version"]
            if version != SCHEMA_VERSION:
                raise IntegrityError(
                    f"manifest schema {version!r}, this version reads {SCHEMA_VERSION}", expected=digest
                )
            manifest = cls.model_validate_json(data)
        except (ValueError, LookupError, TypeError) as error:
            raise IntegrityError(f"not a manifest: {error}", expected=digest) from error
        if manifest.to_bytes() != data:
            # Else it would give itself another name than the one that it was asked for by.
            raise IntegrityError("manifest is not in canonical form", expected=digest)
        return manifest


def canonical_json(value: object) -> bytes:
    """JSON that is the same for the same value, so that its digest can name it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
