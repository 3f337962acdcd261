"""`enginemesh demo`: the real builder, engine and services, twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.embedded import free_port
from cli.sample_model import fetch_sample_model

ENGINEMESH = str(Path(sys.executable).parent / "enginemesh")
REPOSITORY = Path(__file__).parents[2]
RUN_LIMIT_S = 500


@pytest.fixture
def data(tmp_path):
    """A data folder that has the weights already."""
    sources = tmp_path / "sources"
    sources.mkdir()
    weights = fetch_sample_model(REPOSITORY / ".cache" / "models")
    shutil.copy(weights, sources)
    return tmp_path


def run_demo(data):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINEMESH_")}
    done = subprocess.run(
        [ENGINEMESH, "demo", "--data", str(data), "--port", str(free_port())],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.openvino
@pytest.mark.timeout(2 * RUN_LIMIT_S)
def test_demo_shows_the_whole_path_and_finds_its_engine_again(data):
    first = run_demo(data)
    for stage in ("fetch", "convert", "quantise", "compile", "publish"):
        assert re.search(rf"\d %  {stage}", first)
    assert "is built and published" in first
    assert re.search(r"first token \d+ ms · [\d.]+ ms per token · [\d.]+ tokens/s", first)
    for span in ("Inference/Generate", "admission", "send ", "process ", "engine.prefill", "engine.decode"):
        assert span in first
    assert float(re.search(r"([\d.]+)% covered", first)[1]) > 95
    assert "grpcurl -plaintext" in first

    second = run_demo(data)
    assert "was in the store already" in second
    assert "convert" not in second
    assert _answer(first) == _answer(second)  # greedy, on an engine that is reproducible


def _answer(output):
    return re.search(r"4/5 .*?\n(.*?)\nfirst token", output, re.DOTALL)[1]
