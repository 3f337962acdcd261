"""Resumable parts: what one attempt has finished the next does not do again, whatever the kind."""

from __future__ import annotations

import pytest

from build_worker.backends.base import BuildInput, EngineTraits, Part, ResumableBuilder
from build_worker.backends.fake import FakeBuilder
from build_worker.parts import PartKeeper, run_parts
from build_worker.scratch import Scratch
from build_worker.stages import Stage
from mesh.errors import UnavailableError
from mesh.manifest import TokenizerInfo
from mesh.model_file import ModelFile
from mesh.target import Target

KEY = "k" * 64
SPEC = ModelFile(model="m", kind="fake")


class KilledError(Exception):
    """The worker dies here."""


class ThreePartBuilder:
    """In the shape of TensorRT-LLM: quantise to a checkpoint, compile it, collect the tokenizer."""

    def __init__(self, dies_in=""):
        self.done = []
        self._dies_in = dies_in

    def validate(self, spec):
        pass

    def runtime_versions(self):
        return {}

    def tool_versions(self):
        return {}

    def parts(self, spec):
        return (
            Part("quantise", Stage.QUANTISE),
            Part("compile", Stage.COMPILE),
            Part("collect", Stage.COMPILE),
        )

    def run_part(self, part, job, result, report):
        if part.name == self._dies_in:
            (result / "half").write_text("made")
            raise KilledError
        if part.name == "quantise":
            (result / "checkpoint").mkdir()
            weights = (job.source / "weights").read_text()
            (result / "checkpoint" / "rank0.safetensors").write_text(f"small {weights}")
        elif part.name == "compile":
            checkpoint = (job.previous / "checkpoint" / "rank0.safetensors").read_text()
            (result / "rank0.engine").write_text(f"compiled {checkpoint}")
        else:
            (result / "rank0.engine").write_bytes((job.previous / "rank0.engine").read_bytes())
            (result / "tokenizer.json").write_text((job.source / "tokenizer.json").read_text())
        self.done.append(part.name)

    def build(self, job, report):
        for path in job.previous.iterdir():
            path.replace(job.output / path.name)
        return EngineTraits("fp8", 1, 1, 1, TokenizerInfo(vocab_size=1))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").write_text("weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def attempt(store, source, tmp_path):
    """Runs the parts of a builder as an attempt does, each in folders of its own."""
    count = 0

    def run(builder, key=KEY, scratch=None, limit_bytes=1 << 20):
        nonlocal count
        count += 1
        folder = tmp_path / f"attempt-{count}"
        for name in ("work", "output"):
            (folder / name).mkdir(parents=True)
        kept = []
        scratch = scratch or Scratch(store.objects, "b1", limit_bytes)
        target = Target.from_name("a10")
        job = BuildInput(SPEC, source, target, folder / "work", folder / "output")
        keeper = PartKeeper(scratch, key, is_retry=count > 1)
        result = run_parts(builder, job, lambda *_: None, keeper, lambda part: kept.append(part.name))
        return kept, {path.name: path.read_text() for path in result.iterdir()}

    return run


@pytest.mark.parametrize("dies_in", ["quantise", "compile", "collect"])
def test_next_attempt_goes_on_after_the_last_finished_part(attempt, dies_in):
    names = ["quantise", "compile", "collect"]
    done, left = names[: names.index(dies_in)], names[names.index(dies_in) :]
    with pytest.raises(KilledError):
        attempt(ThreePartBuilder(dies_in))

    builder = ThreePartBuilder()
    kept, files = attempt(builder)

    assert (kept, builder.done) == (done, left)
    assert files == {"rank0.engine": "compiled small weights", "tokenizer.json": "{}"}


def test_all_parts_done_means_none_is_run(attempt):
    attempt(ThreePartBuilder())
    builder = ThreePartBuilder()

    kept, files = attempt(builder)

    assert (kept, builder.done) == (["quantise", "compile", "collect"], [])
    assert files["rank0.engine"] == "compiled small weights"


def test_nothing_is_taken_from_another_key(attempt):
    attempt(ThreePartBuilder())
    builder = ThreePartBuilder()

    kept, _ = attempt(builder, key="o" * 64)

    assert (kept, len(builder.done)) == ([], 3)


def test_damaged_result_is_made_anew_from_the_one_before(attempt, store):
    with pytest.raises(KilledError):
        attempt(ThreePartBuilder("collect"))
    store.objects.put_bytes(f"scratch/b1/{KEY}/compile/0", b"other bytes of it")
    builder = ThreePartBuilder()

    kept, files = attempt(builder)

    assert (kept, builder.done) == (["quantise"], ["compile", "collect"])
    assert files["rank0.engine"] == "compiled small weights"


def test_result_above_the_limit_is_not_kept(attempt, store):
    with pytest.raises(KilledError):
        attempt(ThreePartBuilder("compile"), limit_bytes=3)

    assert list(store.objects.list("scratch/")) == []


def test_store_that_is_away_keeps_nothing_and_stops_nothing(attempt, monkeypatch):
    def fail(*_):
        raise UnavailableError("the store is away", 1.0)

    monkeypatch.setattr(Scratch, "keep", fail)
    builder = ThreePartBuilder()

    _, files = attempt(builder)

    assert len(builder.done) == 3
    assert files["tokenizer.json"] == "{}"


@pytest.mark.parametrize("builder", [FakeBuilder(), ThreePartBuilder()])
def test_builders_with_parts_are_seen_as_such(builder):
    assert isinstance(builder, ResumableBuilder)
