"""What the pages point to exists."""

import re
from pathlib import Path

import pytest
import typer.main

from cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    text = page.read_text()
    known = typer.main.get_command(app).commands.keys()
    assert set(re.findall(r"^(?:\.venv/bin/)?enginemesh ([a-z]+)", text, re.MULTILINE)) <= known
    assert set(re.findall(r"`enginemesh ([a-z]+)", text)) <= known
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
