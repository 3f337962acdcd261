"""Ed25519 signatures of manifests: who made an engine, and whether that key is trusted here.

A signature is detached: it is made over the manifest's canonical bytes, and names its key. As the manifest
names every blob by its sha256, the signature vouches for the whole engine. An engine may have several, by
different keys; one that is trusted suffices.

Keys are PEM files: the private one PKCS #8, as `openssl genpkey -algorithm ed25519` writes it, the public one
SubjectPublicKeyInfo.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, StringConstraints

from mesh.errors import IntegrityError, PreconditionError
from mesh.manifest import canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from typing_extensions import Self

    from mesh.settings import MeshSettings

Policy = Literal["require", "warn", "off"]

SIGNATURE_LIMIT_BYTES = 1024
"""Of one signature in the store."""

PUBLIC_KEY_SUFFIX = ".pub"
KEY_LIMIT_BYTES = 64 << 10
_KEY_ID_DIGITS = 16
_PEM_BLOCK = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----\s*", re.DOTALL)


class Signature(BaseModel):
    """One signature, as it lies in the store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: Literal["ed25519"] = "ed25519"
    key_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    signature: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{86}==$")]

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes) -> Signature:
        """The inverse of to_bytes; raises IntegrityError if it is no signature."""
        try:
            return cls.model_validate_json(data)
        except ValueError as error:
            raise IntegrityError("not a signature") from error


class SignatureState(enum.Enum):
    """What the signatures of an engine are worth to whoever looks."""

    VERIFIED = "verified"
    """A trusted key signed exactly this manifest."""
    UNSIGNED = "unsigned"
    """There is no signature."""
    UNTRUSTED = "untrusted"
    """Only keys signed it that are not trusted here."""
    INVALID = "invalid"
    """A signature names a trusted key, and that key did not sign this manifest."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the signatures of an engine are worth, and why.

    Attributes:
        key_id: Of the trusted key that signed it; empty unless verified.
    """

    state: SignatureState
    reason: str
    key_id: str = ""


class SigningKey:
    """A private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key()
        self.key_id = key_id(self.public)

    @classmethod
    def generate(cls) -> Self:
        """A new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a private key.

        Raises:
            PreconditionError: there is no such file, or it is no unencrypted Ed25519 key (BAD_KEY).
        """
        try:
            key = serialization.load_pem_private_key(_read(path), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # the cause might quote the file
            raise _bad_key(path, "holds no unencrypted private key in PEM") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise _bad_key(path, "is no Ed25519 key")
        return cls(key)

    def save(self, path: Path) -> Path:
        """Writes the key, readable by its owner alone, and the public one beside it; returns where that is.

        Raises:
            FileExistsError: a key is there; it is never overwritten.
        """
        private = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private)
        public = path.with_name(path.name + PUBLIC_KEY_SUFFIX)
        public.write_bytes(self.public_pem())
        return public

    def public_pem(self) -> bytes:
        """The public key, for those who shall trust it."""
        return self.public.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def sign(self, data: bytes) -> Signature:
        """Signs a manifest's canonical bytes. The same key and bytes always give the same signature."""
        return Signature(key_id=self.key_id, signature=base64.b64encode(self._key.sign(data)).decode())


class Trust:
    """Which keys are trusted here, and what becomes of engines that none of them signed.

    Args:
        keys: Public keys by their id.
        policy: require: such engines are refused; warn: used, and a warning is logged; off: just used.
    """

    def __init__(self, keys: Mapping[str, Ed25519PublicKey], policy: Policy) -> None:
        self._keys = dict(keys)
        self.policy = policy

    @classmethod
    def from_settings(cls, settings: MeshSettings) -> Self:
        """As the settings say; raises as `load_public_keys` does."""
        path = settings.trusted_keys
        return cls(load_public_keys(path) if path is not None else {}, settings.signature_policy)

    def including(self, key: SigningKey) -> Trust:
        """The same trust, and in this key too."""
        return Trust({**self._keys, key.key_id: key.public}, self.policy)

    @property
    def key_ids(self) -> list[str]:
        """Of every trusted key."""
        return sorted(self._keys)

    def examine(self, data: bytes, signatures: Iterable[Signature]) -> Verdict:
        """What signatures over these bytes, a manifest in canonical form, are worth."""
        signatures = list(signatures)
        known = [signature for signature in signatures if signature.key_id in self._keys]
        for signature in known:
            if _is_valid(self._keys[signature.key_id], signature, data):
                return Verdict(SignatureState.VERIFIED, f"signed by {signature.key_id}", signature.key_id)
        if known:
            return Verdict(
                SignatureState.INVALID, f"the signature of {_listed(known)} does not fit the manifest"
            )
        if signatures:
            return Verdict(SignatureState.UNTRUSTED, f"signed by {_listed(signatures)}, which is not trusted")
        return Verdict(SignatureState.UNSIGNED, "not signed")

    def refusal(self, data: bytes, signatures: Iterable[Signature]) -> str:
        """Why an engine may not be used here; empty if it may."""
        if self.policy != "require":
            return ""
        verdict = self.examine(data, signatures)
        if verdict.state is SignatureState.VERIFIED:
            return ""
        hint = "" if self._keys else " (no key is trusted: set ENGINEMESH_TRUSTED_KEYS)"
        return f"{verdict.reason}; the policy is to require a trusted signature{hint}"


def key_id(key: Ed25519PublicKey) -> str:
    """The name of a key: the first 16 digits of the sha256 of its 32 bytes."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:_KEY_ID_DIGITS]


def load_public_keys(path: Path) -> dict[str, Ed25519PublicKey]:
    """The public keys in a PEM file, or in all files *.pub of a folder, by id.

    Raises:
        PreconditionError: there is no such file or folder, or a file holds no Ed25519 key (BAD_KEY).
    """
    files = sorted(path.glob(f"*{PUBLIC_KEY_SUFFIX}")) if path.is_dir() else [path]
    keys: dict[str, Ed25519PublicKey] = {}
    for file in files:
        blocks = _PEM_BLOCK.findall(_read(file))
        if not blocks:
            raise _bad_key(file, "holds no public key in PEM")
        for block in blocks:
            try:
                key = serialization.load_pem_public_key(block)
            except (ValueError, UnsupportedAlgorithm):
                raise _bad_key(file, "holds a public key that cannot be read") from None
            if not isinstance(key, Ed25519PublicKey):
                raise _bad_key(file, "holds a key that is no Ed25519 key")
            keys[key_id(key)] = key
    return keys


def _is_valid(key: Ed25519PublicKey, signature: Signature, data: bytes) -> bool:
    try:
        key.verify(base64.b64decode(signature.signature), data)
    except InvalidSignature:
        return False
    return True


def _listed(signatures: Iterable[Signature]) -> str:
    return ", ".join(f"key {signature.key_id}" for signature in signatures)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(KEY_LIMIT_BYTES)
    except OSError as error:
        raise _bad_key(path, f"cannot be read: {error.strerror}") from None


def _bad_key(path: Path, problem: str) -> PreconditionError:
    return PreconditionError("BAD_KEY", str(path), f"key file {path} {problem}")
