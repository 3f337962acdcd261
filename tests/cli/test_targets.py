"""`enginemesh targets` lists what is known and what is here; the doctor sees the same GPUs."""

from __future__ import annotations

import json
import sys

import pytest

from cli.checks import State, check_gpus
from mesh.gpus import GPUS, target_names
from mesh.target import detect_cpu
from tests.mesh import stand_in_nvml
from tests.mesh.stand_in_nvml import Card, Instance, StandIn


@pytest.fixture
def host(monkeypatch):
    """Two H200s, one of them cut, in place of this host's GPUs."""
    small = Instance("MIG-1", "NVIDIA H200 MIG 1g.18gb", 16384, 16)
    cards = [
        Card("GPU-1", "NVIDIA H200", (9, 0), 143771),
        Card("GPU-2", "NVIDIA H200", (9, 0), 143771, instances={0: small, 1: small}),
    ]
    stand_in = StandIn(cards)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return stand_in


def test_table_shows_known_gpus_and_this_host(host, invoke):
    out = invoke("targets").stdout
    lines = {tuple(line.split()[:2]): line for line in out.splitlines() if line}

    assert all((gpu.key, gpu.compute_capability) in lines for gpu in GPUS.values())
    assert "1g.18gb 1g.35gb 2g.35gb" in lines["h200", "9.0"]
    assert "sm90-h200-mig-1g.18gb-cuda13" in lines["h200:mig-1g.18gb", "2"]
    assert "sm90-h200-cuda13" in lines["h200", "1"]
    assert (detect_cpu().name, "1") in lines


def test_json_has_plain_numbers(host, invoke):
    found = json.loads(invoke("targets", "--json").stdout)
    known = {target["name"]: target for target in found["known"]}

    assert list(known) == target_names()
    assert known["h200"]["bandwidth_bytes_per_s"] == 4_800_000_000_000
    assert known["h200:mig-1g.18gb"]["bandwidth_bytes_per_s"] == 600_000_000_000
    assert known["h200:mig-1g.18gb"]["instances"] == 7
    assert known["a100-sxm-80gb"]["memory_bytes"] == 81920 << 20
    assert "fp8" in known["l4"]["precisions"]
    assert "fp8" not in known["a10"]["precisions"]
    here = [target["name"] for target in found["this_host"]]
    assert here == ["h200", "h200:mig-1g.18gb", "h200:mig-1g.18gb", detect_cpu().name]


def test_doctor_counts_gpus(host):
    found = check_gpus()

    assert found.state is State.ok
    assert found.detail == "sm90-h200-cuda13, 2 x sm90-h200-mig-1g.18gb-cuda13"


def test_doctor_says_why_there_are_none(host, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = check_gpus()
    host.failure = stand_in_nvml.NVMLError_LibraryNotFound()
    absent = check_gpus()
    host.failure = stand_in_nvml.NVMLError_Unknown("mismatch")
    broken = check_gpus()

    assert (hidden.state, hidden.hint) == (State.missing, "CUDA_VISIBLE_DEVICES hides them")
    assert (absent.state, absent.hint) == (State.missing, "kinds for GPUs need an NVIDIA driver")
    assert broken.state is State.failed
    assert "mismatch" in broken.detail
