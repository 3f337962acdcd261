"""In every process of the project gRPC core knows how to poll before `grpc` is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

REPORT_WHEN_IMPORTED = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            sys.meta_path.remove(self)
            print(os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""
ENTRIES = [
    "gateway.main",
    "infer_worker.main",
    "build_worker.main",
    "cli.main",
    "cli.client",
    "benchmarks.cpu",
]
CHOICE = "-event_engine_client,-event_engine_listener"


def experiments_at_import(module: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", REPORT_WHEN_IMPORTED, module]
    result = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    return result.stdout.strip()


@pytest.mark.parametrize("module", ENTRIES)
def test_choice_is_made_before_grpc_is_imported(module):
    assert experiments_at_import(module) in {CHOICE, ""}  # "": it does without grpc


@pytest.mark.parametrize("module", ENTRIES[:3])
def test_services_import_grpc(module):
    assert experiments_at_import(module) == CHOICE


def test_the_environment_has_the_say():
    assert experiments_at_import("gateway.main", GRPC_EXPERIMENTS="tcp_frame_size_tuning") == (
        "tcp_frame_size_tuning"
    )
