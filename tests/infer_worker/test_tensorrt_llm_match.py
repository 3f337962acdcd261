"""An engine of kind tensorrt_llm is refused by its manifest wherever anything that it depends on differs."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from infer_worker.engine_choice import Device, choose_engine
from mesh.engine_store import EngineRecord
from mesh.signing import Trust
from mesh.target import Target
from tests.stand_ins.paths import TENSORRT_LLM
from tests.stand_ins.tensorrt_llm_engine import TARGET, VERSIONS, make_engine

SLICE = Target.from_name("h100-sxm-80gb:mig-1g.10gb")


@pytest.fixture
def library(monkeypatch):
    """What is installed here is the stand-in: TensorRT-LLM 1.2.1 with its TensorRT."""
    monkeypatch.syspath_prepend(str(TENSORRT_LLM))


def refusals(tmp_path, found: Target, **fields) -> tuple[str, ...]:
    """Why a worker on `found` passes over an engine; empty if it takes it."""
    manifest = make_engine(tmp_path / "engine", **fields)
    record = EngineRecord(manifest, datetime.now(timezone.utc))
    trust = Trust({}, "off")
    device = Device(found, ["tensorrt_llm"], "exact", trust)
    choice = choose_engine([record], device)
    assert (choice.record is None) == bool(choice.refusals)
    return choice.refusals


def test_engine_for_this_very_hardware_and_library_is_taken(library, tmp_path):
    assert refusals(tmp_path, TARGET) == ()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Target.from_name("a100-sxm-80gb"), "compute capability: engine expects 9.0, found 8.0"),
        (
            Target.from_name("h200"),
            "device name: engine expects NVIDIA H100 80GB HBM3, found NVIDIA H200",
        ),
        (SLICE, "mig profile: engine expects none, found 1g.10gb"),
        (TARGET.model_copy(update={"cuda_major": 12}), "cuda major: engine expects 13, found 12"),
        (Target.from_name("cpu-x86_64-avx512"), "device type: engine expects gpu, found cpu"),
    ],
)
def test_other_hardware_is_refused_with_the_reason(library, tmp_path, target, why):
    assert why in refusals(tmp_path, target)[0]


@pytest.mark.parametrize(("tool", "version"), [("tensorrt", "10.11.0.33"), ("tensorrt_llm", "1.1.0")])
def test_other_versions_are_refused_with_the_reason(library, tmp_path, tool, version):
    why = refusals(tmp_path, TARGET, versions={**VERSIONS, tool: version})[0]
    assert f"{tool} version: engine expects {version}, found {VERSIONS[tool]}" in why


def test_engine_for_a_slice_is_refused_on_the_whole_gpu(library, tmp_path):
    why = refusals(tmp_path, TARGET, target=SLICE)[0]
    assert "mig profile: engine expects 1g.10gb, found none" in why


def test_host_without_the_library_refuses_and_says_so(tmp_path):
    assert "tensorrt_llm version: engine expects 1.2.1, found none" in refusals(tmp_path, TARGET)[0]
