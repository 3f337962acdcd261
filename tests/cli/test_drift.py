"""The comparison of a library with its contract, on the stand-in and on changed contracts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from cli import drift
from cli.checks import State
from mesh.contract import Contract
from tests.stand_ins.paths import TENSORRT_LLM, TRTLLM_BUILD

EXECUTOR = "tensorrt_llm.bindings.executor"


@pytest.fixture
def library(monkeypatch):
    """The stand-in can be imported; no programs of the library are there."""
    monkeypatch.syspath_prepend(str(TENSORRT_LLM))
    monkeypatch.setenv("PATH", "/nowhere")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def contract():
    """A contract of the test's own."""
    Contract.load.cache_clear()
    yield Contract.load("tensorrt_llm")
    Contract.load.cache_clear()


def states(checks):
    return {check.name.rpartition(".")[2]: check.state for check in checks}


def test_stand_in_is_as_the_contract_says(library):
    checks = drift.check_drift("tensorrt_llm")
    assert [check for check in checks if check.state is State.failed] == []
    assert states(checks)["ExecutorConfig"] is State.ok


def test_lost_argument_and_member_fail(library, contract):
    # What the library knows and the contract does not is told, and no failure.
    from tensorrt_llm.bindings import executor

    assert executor.Request
    request = contract.classes["Request"]["params"]
    request.append({"name": "magic", "kind": "keyword_only", "type": "int", "default": 1})
    del request[2]  # streaming
    contract.classes["FinishReason"]["attributes"].append("BORED")
    found = {check.name: check for check in drift.check_drift("tensorrt_llm")}
    assert found[f"{EXECUTOR}.Request"].state is State.failed
    assert found[f"{EXECUTOR}.Request"].detail == "no argument magic; new argument streaming"
    assert found[f"{EXECUTOR}.FinishReason"].detail == "no BORED"


def test_other_version_fails(library, contract):
    contract.version = "9.9"
    version = drift.check_drift("tensorrt_llm")[0]
    assert (version.state, version.detail) == (State.failed, "1.2.1")


def test_flags_of_the_builder_are_compared(library, contract, tmp_path, monkeypatch):
    program = tmp_path / "trtllm-build"
    flags = sorted(contract.flags("trtllm-build") - {"gemm_plugin"})
    program.write_text("#!/bin/sh\necho " + " ".join(f"--{flag}" for flag in [*flags, "shiny"]) + "\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    check = next(check for check in drift.check_drift("tensorrt_llm") if check.name == "trtllm-build")
    assert (check.state, check.detail) == (State.failed, "no flag gemm_plugin; new flag shiny")


def test_stand_in_of_the_builder_has_every_flag(library, monkeypatch):
    monkeypatch.setenv("PATH", f"{TRTLLM_BUILD.parent}:/bin:/usr/bin:{Path(sys.executable).parent}")
    check = next(check for check in drift.check_drift("tensorrt_llm") if check.name == "trtllm-build")
    assert (check.state, check.detail) == (State.ok, "as expected")


def test_library_that_is_not_there_is_told():
    checks = drift.check_drift("tensorrt_llm")
    assert [check.state for check in checks] == [State.failed]
    assert "cannot be imported: ModuleNotFoundError" in checks[0].detail


def test_arguments_are_read_of_every_sort_of_class():
    class Model(BaseModel):
        size: int = 0

    @dataclass
    class Record:
        size: int

    class Plain:
        def __init__(self, size, **kwargs):
            pass

    class Binding:
        def __init__(self):
            """__init__(self, size: dict[str, int] = {}, *, name: str | None = None) -> None"""

    assert drift.arguments_of(Model) == {"size"}
    assert drift.arguments_of(Record) == {"size"}
    assert drift.arguments_of(Plain) == {"size", "kwargs"}
    assert drift.arguments_of(Binding) == {"size", "name"}


def test_doctor_compares_a_kind_and_refuses_one_without_contract(tmp_path):
    program = Path(sys.executable).with_name("enginemesh")
    environment = {**os.environ, "PYTHONPATH": str(TENSORRT_LLM), "PATH": "/nowhere"}
    run = subprocess.run(
        [program, "doctor", "--kind", "tensorrt_llm", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{EXECUTOR}.SamplingConfig" in run.stdout
    run = subprocess.run([program, "doctor", "--kind", "fake"], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "no contract for kind 'fake', only for tensorrt_llm" in run.stderr
