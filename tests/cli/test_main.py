"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cli.main import PANEL_OF

HEAVY = ("redis", "minio", "psutil", "cryptography", "cli.chaos", "cli.local_mesh", "cli.store_access")


def test_help_shows_every_command(invoke):
    out = invoke("--help", env={"COLUMNS": "200"}).stdout
    assert [name for name in PANEL_OF if f" {name} " not in out] == []
    assert "Serve large language models" in out
    assert "Exit status" in out


@pytest.mark.parametrize("name", PANEL_OF)
def test_each_command_explains_itself(name, invoke):
    assert f"enginemesh {name}" in invoke(name, "-h").stdout


def test_an_unknown_command_is_refused_with_the_nearest(run_command):
    status, _, error = run_command("modles")
    assert status == 2
    assert "'models'" in error


def test_a_light_command_imports_nothing_heavy():
    program = (
        "import sys; from cli.main import app; app(['models', '--help'], standalone_mode=False); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
