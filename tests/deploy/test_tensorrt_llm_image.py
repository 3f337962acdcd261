"""The image of TensorRT-LLM's workers: what can be said of it without building it."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
KEEPER = runpy.run_path(str(FOLDER / "keep_image.py"))


@pytest.fixture(scope="module")
def lines():
    return (FOLDER / "tensorrt-llm.Dockerfile").read_text().splitlines()


def test_entrypoint_of_the_image_is_kept(lines):
    assert not any(line.startswith("ENTRYPOINT") for line in lines)
    assert sum(line.startswith("CMD") for line in lines) == 2
    assert "FROM nvcr.io/nvidia/tensorrt-llm/release:1.2.1 AS base" in lines


def test_all_that_is_copied_and_started_is_there(lines):
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
    for module in re.findall(r'"-m", "([a-z_.]+)"', "\n".join(lines)):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_changed_packages_are_told(tmp_path, capsys):
    file = tmp_path / "image.json"
    now = KEEPER["installed"]()
    file.write_text(json.dumps({**now, "pydantic": "0.1"}))

    assert KEEPER["main"]("compare", file) == 0
    assert f"changed pydantic 0.1 -> {now['pydantic']}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tokenizers", "torch"])
def test_changed_package_of_the_library_fails_the_image(tmp_path, name):
    file = tmp_path / "image.json"
    file.write_text(json.dumps({**KEEPER["installed"](), name: "0.1"}))

    assert KEEPER["main"]("compare", file) == 1


def test_unchanged_image_passes(tmp_path):
    file = tmp_path / "image.json"

    assert KEEPER["main"]("note", file) == 0
    assert KEEPER["main"]("compare", file) == 0
