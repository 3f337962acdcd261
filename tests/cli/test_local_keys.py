"""A mesh on this machine signs with a key of its own, made once, unless the settings name another."""

from __future__ import annotations

from pathlib import Path

from cli.local_keys import local_keys
from mesh.settings import ClientSettings
from mesh.signing import SigningKey, load_public_keys


def test_key_is_made_once_and_trusted(tmp_path):
    first = local_keys(ClientSettings(data_dir=tmp_path))
    key = SigningKey.load(Path(first["ENGINEMESH_SIGNING_KEY"]))

    assert list(load_public_keys(Path(first["ENGINEMESH_TRUSTED_KEYS"]))) == [key.key_id]
    assert local_keys(ClientSettings(data_dir=tmp_path)) == first
    assert SigningKey.load(Path(first["ENGINEMESH_SIGNING_KEY"])).key_id == key.key_id


def test_further_keys_beside_it_are_trusted(tmp_path):
    trusted = Path(local_keys(ClientSettings(data_dir=tmp_path))["ENGINEMESH_TRUSTED_KEYS"])
    other = SigningKey.generate()
    (trusted / "other.pub").write_bytes(other.public_pem())

    assert other.key_id in load_public_keys(trusted)
    assert len(load_public_keys(trusted)) == 2


def test_keys_of_the_settings_are_kept_wherever_a_process_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SigningKey.generate().save(Path("mine"))
    settings = ClientSettings(data_dir=tmp_path / "data", signing_key="mine", trusted_keys="mine.pub")
    (tmp_path / "data").mkdir()

    assert local_keys(settings) == {
        "ENGINEMESH_SIGNING_KEY": str(tmp_path / "mine"),
        "ENGINEMESH_TRUSTED_KEYS": str(tmp_path / "mine.pub"),
    }
    assert not list((tmp_path / "data" / "keys").iterdir())
