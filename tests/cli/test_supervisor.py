"""The supervisor with real child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from cli import supervisor as supervisor_module
from cli.supervisor import ChildSpec, Supervisor
from cli.tether import tethered

OBEDIENT = "import signal, sys; print('up', flush=True); signal.sigwait([signal.SIGTERM]); print('bye')"
STUBBORN = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "while True: time.sleep(1)"
)


def _spec(name, program, grace_s=20.0):
    def start():
        # As for the real children: a session of its own, output piped.
        command = tethered([sys.executable, "-c", f"import signal\n{BLOCK_TERM}{program}"])
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

    return ChildSpec(name, start, grace_s)


# Blocked before anything else, so that a signal sent at once is not lost or deadly.
BLOCK_TERM = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"


def _until(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def quick_restarts(monkeypatch):
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def supervisor(tmp_path, lines):
    """A supervisor whose reports go to `lines`."""
    made = Supervisor(tmp_path / "logs", lines.append)
    yield made
    made.stop()


def test_killed_child_is_started_again(supervisor, lines, quick_restarts):
    (child,) = supervisor.start(_spec("worker", OBEDIENT))
    first = child.process_id
    os.kill(first, signal.SIGKILL)
    _until(lambda: child.process_id not in (first, None))
    assert lines == ["worker was ended by SIGKILL; starting it again in 0.0 s"]


def test_pauses_grow_while_a_child_keeps_failing(supervisor, lines, quick_restarts):
    (child,) = supervisor.start(_spec("gateway", "raise SystemExit(3)"))
    _until(lambda: child.failures_in_a_row >= 6)
    assert "gateway ended with status 3; starting it again in 0.0 s" in lines
    assert lines[5].endswith("in 0.3 s")


def test_first_start_that_fails_is_raised(supervisor):
    def start():
        raise RuntimeError("no such server")

    with pytest.raises(RuntimeError, match="no such server"):
        supervisor.start(ChildSpec("valkey", start, 1.0))


def test_stop_ends_last_stage_first(supervisor, tmp_path):
    note = tmp_path / "order"
    program = (
        "print('up', flush=True); signal.sigwait([signal.SIGTERM]); "
        f"open({str(note)!r}, 'a').write('{{name}}\\n')"
    )
    for name in ("store", "worker", "gateway"):
        supervisor.start(_spec(name, program.format(name=name)))
        _until(lambda name=name: "up" in _log(tmp_path, name))
    supervisor.stop()
    assert note.read_text().split() == ["gateway", "worker", "store"]


def test_stop_kills_child_after_its_grace_time(supervisor, lines, tmp_path):
    (child,) = supervisor.start(_spec("worker", STUBBORN, grace_s=0.2))
    _until(lambda: "up" in _log(tmp_path, "worker"))
    process_id = child.process_id
    supervisor.stop()
    assert not psutil.pid_exists(process_id)
    assert lines == ["worker did not stop within 0 s and is killed"]


def test_stop_while_child_waits_to_be_restarted_is_immediate(supervisor, monkeypatch):
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 100.0)
    monkeypatch.setattr(supervisor_module, "LONGEST_PAUSE_S", 100.0)
    (child,) = supervisor.start(_spec("worker", "raise SystemExit(1)"))
    _until(lambda: child.failures_in_a_row == 1)
    started = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - started < 20


def test_output_is_logged_and_echoed(tmp_path):
    echoed = []
    supervisor = Supervisor(tmp_path, print, lambda name, line: echoed.append((name, line)))
    supervisor.start(_spec("gateway", OBEDIENT))
    _until(lambda: echoed)
    supervisor.stop()
    _until(lambda: ("gateway", "bye") in echoed)
    assert echoed == [("gateway", "up"), ("gateway", "bye")]
    assert (tmp_path / "gateway.log").read_text() == "up\nbye\n"


def test_second_interrupt_kills_what_is_left(supervisor, tmp_path):
    (child,) = supervisor.start(_spec("worker", STUBBORN, grace_s=50.0))
    _until(lambda: "up" in _log(tmp_path, "worker"))
    process_id = child.process_id
    # To the process, as the terminal does it: a signal to another thread would not wake this one.
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        supervisor.stop()
    assert not psutil.pid_exists(process_id)


def test_children_end_with_killed_supervisor(tmp_path):
    pids = tmp_path / "pids"
    program = (
        "import subprocess, sys, time\n"
        "from cli.tether import tethered\n"
        "child = subprocess.Popen(tethered(['sleep', '1000']))\n"
        f"open({str(pids)!r}, 'w').write(f'{{child.pid}}\\n')\n"
        "time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    _until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    child = psutil.Process(int(pids.read_text()))
    _until(lambda: child.name() == "sleep")  # tied and become the command
    parent.kill()
    parent.wait()
    _until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def _log(tmp_path, name):
    path = tmp_path / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def test_retired_child_ends_and_is_forgotten_while_others_run(supervisor, lines):
    stage = supervisor.start(_spec("first", OBEDIENT))
    child = supervisor.add(stage, _spec("second", OBEDIENT))
    assert [c.spec.name for c in supervisor.children] == ["first", "second"]
    supervisor.retire(child)
    assert child.is_stopping
    _until(lambda: [c.spec.name for c in supervisor.children] == ["first"])
    assert child.has_ended
    assert stage[0].process_id is not None
    assert lines == []


def test_child_that_was_added_and_does_not_start_says_why(supervisor):
    def fail():
        raise OSError("no more processes")

    stage = supervisor.start(_spec("first", OBEDIENT))
    with pytest.raises(OSError, match="no more processes"):
        supervisor.add(stage, ChildSpec("second", fail, 1.0))
    assert [child.spec.name for child in supervisor.children] == ["first"]
