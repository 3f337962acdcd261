"""A minute of chaos: the promises hold while workers die, stop and drain and Redis fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_a_minute_of_chaos_breaks_no_promise():
    command = [
        Path(sys.executable).with_name("enginemesh"),
        "chaos",
        "--seed",
        "7",
        "--minutes",
        "1",
        "--json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout.splitlines()[0])
    assert report["violations"] == [], run.stderr
    assert run.returncode == 0
    assert report["finished"] > 100
    assert report["worker_deaths"] >= 3
