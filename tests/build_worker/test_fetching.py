"""Fetching: all sources of a build, each with its digest; what came from a hub is kept."""

from __future__ import annotations

import pytest

from build_worker import fetching, source
from build_worker.child_messages import FetchTask, ScratchPlace
from mesh.errors import InvalidFieldError
from mesh.settings import BuildWorkerSettings


@pytest.fixture
def fetch(environment, tmp_path):
    """Runs fetch tasks, each in a folder of its own; returns what they say and the progress."""
    count = 0

    def run(place, more=None, scratch=None):
        nonlocal count
        count += 1
        folder = tmp_path / f"fetch-{count}"
        folder.mkdir()
        seen = []
        task = FetchTask(source=place, folder=folder, more_sources=more or {}, scratch=scratch)
        fetched = fetching.fetch(
            task, BuildWorkerSettings(), lambda _stage, fraction, _detail="": seen.append(fraction)
        )
        return fetched, seen

    return run


def test_all_sources_are_read(fetch, tmp_path):
    for name in ("model", "draft", "adapter"):
        (tmp_path / name).write_text(name)

    fetched, seen = fetch("model", {"speculation.source": "draft", "lora[0].source": "adapter"})

    assert fetched.path == tmp_path / "model"
    assert fetched.more_paths == {
        "speculation.source": tmp_path / "draft",
        "lora[0].source": tmp_path / "adapter",
    }
    digests = {fetched.digest, *fetched.more_digests.values()}
    assert len(digests) == 3
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)


def test_error_names_the_field_of_its_source(fetch, tmp_path):
    (tmp_path / "model").write_text("model")

    with pytest.raises(InvalidFieldError, match=r"^spec\.speculation\.source: 'absent'"):
        fetch("model", {"speculation.source": "absent"})


def test_download_from_a_hub_is_kept_for_the_next_attempt(fetch, monkeypatch):
    calls = []

    def download(place, settings, folder, on_fraction):
        calls.append(place)
        (folder / "deep").mkdir()
        (folder / "deep" / "model.safetensors").write_text(f"weights {len(calls)}")
        return folder

    monkeypatch.setattr(source, "fetch", download)
    place = ScratchPlace(build_id="b1", limit_bytes=1000)

    first, _ = fetch("hf://owner/name", scratch=place)
    again, _ = fetch("hf://owner/name", scratch=place.model_copy(update={"is_retry": True}))

    assert calls == ["hf://owner/name"]
    assert again.digest == first.digest
    assert again.path != first.path
    assert (again.path / "deep" / "model.safetensors").read_text() == "weights 1"
