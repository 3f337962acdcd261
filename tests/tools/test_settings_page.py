"""The page of settings is what the settings are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mesh import settings

PROGRAM = Path(__file__).parents[2] / "tools" / "settings_page.py"


@pytest.fixture(scope="module")
def settings_page():
    """tools/settings_page.py as a module."""
    spec = importlib.util.spec_from_file_location("settings_page", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(settings_page):
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.render(), "run `make docs`"


def test_page_has_every_group_and_every_field_a_meaning(settings_page):
    groups = {group for _, group in settings_page.GROUPS}
    for name, kind in vars(settings).items():
        if name.endswith("Settings") and name != "BaseSettings":
            assert kind in groups
            assert all(field.description for field in kind.model_fields.values())
