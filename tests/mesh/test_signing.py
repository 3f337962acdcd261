"""A signature says which key vouches for a manifest; nothing that was changed passes for signed."""

from __future__ import annotations

import base64
import shutil
import stat
import subprocess

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mesh.errors import IntegrityError, PreconditionError
from mesh.settings import MeshSettings
from mesh.signing import Signature, SignatureState, SigningKey, Trust, load_public_keys
from tests import engines

DATA = engines.manifest().to_bytes()


@pytest.fixture
def key():
    return SigningKey.generate()


@pytest.fixture
def trusting(tmp_path):
    """Makes the trust in some keys."""

    def make(*keys: SigningKey, policy: str = "require") -> Trust:
        folder = tmp_path / "trusted"
        folder.mkdir(exist_ok=True)
        for each in keys:
            (folder / f"{each.key_id}.pub").write_bytes(each.public_pem())
        return Trust.from_settings(MeshSettings(trusted_keys=folder, signature_policy=policy))

    return make


def test_trusted_signature_is_verified(key, trusting):
    verdict = trusting(key).examine(DATA, [key.sign(DATA)])

    assert (verdict.state, verdict.key_id) == (SignatureState.VERIFIED, key.key_id)
    assert trusting(key).refusal(DATA, [key.sign(DATA)]) == ""


def test_signature_survives_the_store(key, trusting):
    signature = key.sign(DATA)

    assert Signature.from_bytes(signature.to_bytes()) == signature
    assert key.sign(DATA) == signature


@pytest.mark.parametrize("position", [0, 100, -1])
def test_changed_manifest_is_refused_with_the_key(key, trusting, position):
    changed = bytearray(DATA)
    changed[position] ^= 1
    verdict = trusting(key).examine(bytes(changed), [key.sign(DATA)])

    assert verdict.state is SignatureState.INVALID
    assert f"key {key.key_id} does not fit the manifest" in trusting(key).refusal(
        bytes(changed), [key.sign(DATA)]
    )


def test_changed_signature_is_refused(key, trusting):
    raw = bytearray(base64.b64decode(key.sign(DATA).signature))
    raw[5] ^= 1
    changed = Signature(key_id=key.key_id, signature=base64.b64encode(raw).decode())

    assert trusting(key).examine(DATA, [changed]).state is SignatureState.INVALID


def test_signature_of_another_key_under_a_trusted_name_is_invalid(key, trusting):
    forged = SigningKey.generate().sign(DATA).model_copy(update={"key_id": key.key_id})

    assert trusting(key).examine(DATA, [forged]).state is SignatureState.INVALID


def test_unknown_key_and_no_signature_are_told_apart(key, trusting):
    other = SigningKey.generate()
    trust = trusting(key)

    assert trust.examine(DATA, [other.sign(DATA)]).state is SignatureState.UNTRUSTED
    assert trust.examine(DATA, []).state is SignatureState.UNSIGNED
    assert f"signed by key {other.key_id}, which is not trusted" in trust.refusal(DATA, [other.sign(DATA)])
    assert "not signed" in trust.refusal(DATA, [])


def test_one_trusted_signature_of_several_suffices(key, trusting):
    others = [SigningKey.generate().sign(DATA) for _ in range(3)]

    assert trusting(key).refusal(DATA, [*others, key.sign(DATA)]) == ""


@pytest.mark.parametrize("policy", ["warn", "off"])
def test_other_policies_refuse_nothing(trusting, policy):
    assert trusting(policy=policy).refusal(DATA, []) == ""


def test_without_keys_the_refusal_names_the_setting():
    trust = Trust.from_settings(MeshSettings(signature_policy="require"))

    assert "ENGINEMESH_TRUSTED_KEYS" in trust.refusal(DATA, [])


def test_signatures_are_required_unless_a_setting_says_otherwise(monkeypatch):
    monkeypatch.delenv("ENGINEMESH_SIGNATURE_POLICY")

    assert MeshSettings().signature_policy == "require"


def test_saved_key_is_its_owners_alone_and_never_overwritten(key, tmp_path):
    public = key.save(tmp_path / "key")

    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert SigningKey.load(tmp_path / "key").key_id == key.key_id
    assert list(load_public_keys(public)) == [key.key_id]
    with pytest.raises(FileExistsError):
        SigningKey.generate().save(tmp_path / "key")
    assert SigningKey.load(tmp_path / "key").key_id == key.key_id


def test_one_file_may_hold_several_keys(key, tmp_path):
    other = SigningKey.generate()
    (tmp_path / "keys").write_bytes(b"# ours\n" + key.public_pem() + b"\n# theirs\n" + other.public_pem())

    assert set(load_public_keys(tmp_path / "keys")) == {key.key_id, other.key_id}


def _other_kind_of_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def test_files_that_hold_no_such_key_are_named(tmp_path):
    path = tmp_path / "key.pub"
    other = _other_kind_of_key()
    contents = (
        b"",
        b"nothing of the kind",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        other.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(PreconditionError, match=f"key file {path} ") as raised:
            load_public_keys(tmp_path)
        assert raised.value.reason == "BAD_KEY"
    with pytest.raises(PreconditionError, match="cannot be read: No such file"):
        load_public_keys(tmp_path / "none")


def test_private_keys_of_other_kinds_are_refused_without_quoting_them(key, tmp_path):
    path = tmp_path / "key"
    encrypted = key._key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    other = _other_kind_of_key().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for content in (b"garbage", encrypted, other):
        path.write_bytes(content)
        with pytest.raises(PreconditionError, match=f"key file {path} ") as raised:
            SigningKey.load(path)
        assert raised.value.__cause__ is None
        assert content.decode()[:7] not in raised.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"algorithm":"none","key_id":"0123456789abcdef","signature":""}',
        b'{"algorithm":"ed25519","key_id":"../../etc/passwd","signature":"%s"}' % (b"A" * 86 + b"=="),
        b'{"algorithm":"ed25519","key_id":"0123456789abcdef","signature":"AAAA"}',
        b"\xff",
    ],
)
def test_what_is_no_signature_is_refused(data):
    with pytest.raises(IntegrityError, match="not a signature"):
        Signature.from_bytes(data)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_verifies_the_same_bytes(key, tmp_path):
    (tmp_path / "manifest.json").write_bytes(DATA)
    (tmp_path / "key.pub").write_bytes(key.public_pem())
    (tmp_path / "signature").write_bytes(base64.b64decode(key.sign(DATA).signature))
    command = "openssl pkeyutl -verify -pubin -inkey key.pub -rawin -in manifest.json -sigfile signature"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
