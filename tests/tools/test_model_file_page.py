"""The page of model files is what model files are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mesh.kinds import KINDS
from mesh.model_file import ModelFile

PROGRAM = Path(__file__).parents[2] / "tools" / "model_file_page.py"


@pytest.fixture(scope="module")
def model_file_page():
    """tools/model_file_page.py as a module."""
    spec = importlib.util.spec_from_file_location("model_file_page", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(model_file_page):
    assert model_file_page.PAGE.read_text(encoding="utf-8") == model_file_page.render(), "run `make docs`"


def test_page_has_every_field_and_kind(model_file_page):
    page = model_file_page.render()

    assert all(f"`{name}" in page for name in ModelFile.model_fields)
    assert all(f"### {name}\n" in page for name in KINDS)
