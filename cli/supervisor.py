"""Keeps child processes running, and stops them in order."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from cli import child_logs

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
SETTLED_S = 30.0
"""A child that ran this long is well: its next restart waits FIRST_PAUSE_S again."""


@dataclass(frozen=True)
class ChildSpec:
    """A child process.

    Attributes:
        name: For people, and for its log file.
        start: Starts it; returns when it is up, or raises OSError or RuntimeError. What it writes to a
            piped standard output is logged.
        grace_s: Time from SIGTERM to SIGKILL.
        is_kill_news: Whether people are told when it had to be killed.
    """

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    grace_s: float
    is_kill_news: bool = True


class Supervisor:
    """Children in stages: a stage starts when the one before is up, and stops before it.

    Args:
        log_folder: Where each child's output goes, `<name>.log`.
        report: Called with a line for people when a child ended without being told to.
        echo: Called with name and each line that a child prints; None: only to the log file.
    """

    def __init__(
        self,
        log_folder: Path,
        report: Callable[[str], None],
        echo: Callable[[str, str], None] | None = None,
    ) -> None:
        self.log_folder = log_folder
        self._report = report
        self._echo = echo
        self._stages: list[list[Child]] = []

    def start(self, *specs: ChildSpec) -> list[Child]:
        """Starts a stage and waits until every child of it was started.

        Raises:
            RuntimeError, OSError: a child did not start.
        """
        stage = [Child(spec, self.log_folder, self._report, self._echo) for spec in specs]
        self._stages.append(stage)
        for child in stage:
            child.begin()
        for child in stage:
            child.wait_started()
        return stage

    def add(self, stage: list[Child], spec: ChildSpec) -> Child:
        """Starts one more child in a stage that `start` gave.

        Raises:
            RuntimeError, OSError: it did not start.
        """
        child = Child(spec, self.log_folder, self._report, self._echo)
        stage.append(child)
        child.begin()
        try:
            child.wait_started()
        except (RuntimeError, OSError):
            stage.remove(child)
            raise
        return child

    def retire(self, child: Child) -> None:
        """Stops one child for good as `stop` would, and forgets it; returns at once."""
        child.ask_to_stop()
        Thread(target=self._retire, args=(child,), name=f"end of {child.spec.name}", daemon=True).start()

    def _retire(self, child: Child) -> None:
        child.wait_stopped()
        for stage in self._stages:
            if child in stage:
                stage.remove(child)

    @property
    def children(self) -> list[Child]:
        """All children, in the order of their start."""
        return [child for stage in self._stages for child in stage]

    def stop(self) -> None:
        """Stops the stages, last one first: asks, waits for each child's grace time, kills.

        KeyboardInterrupt (an impatient second Ctrl-C) kills what is left at once.
        """
        try:
            while self._stages:
                stage = list(self._stages[-1])  # one that is retired meanwhile leaves its stage
                for child in stage:
                    child.ask_to_stop()
                for child in stage:
                    child.wait_stopped()
                self._stages.pop()
        except KeyboardInterrupt:
            for child in self.children:
                child.kill()
            self._stages.clear()
            raise


class Child:
    """One child process and its successors."""

    def __init__(
        self,
        spec: ChildSpec,
        log_folder: Path,
        report: Callable[[str], None],
        echo: Callable[[str, str], None] | None,
    ) -> None:
        self.spec = spec
        self.failures_in_a_row = 0
        self._log_folder = log_folder
        self._report = report
        self._echo = echo
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()  # held while the process is replaced
        self._stopping = Event()
        self._started = Event()
        # Waited for in place of the thread: a join that Ctrl-C interrupts takes the thread for ended.
        self._ended = Event()
        self._first_failure: Exception | None = None

    @property
    def process_id(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs or will be started again."""
        return self._ended.is_set()

    def begin(self) -> None:
        """Starts the thread that starts, watches and restarts the process."""
        Thread(target=self._run, name=f"child {self.spec.name}", daemon=True).start()

    def wait_started(self) -> None:
        """Waits for the first start; raises what it raised."""
        self._started.wait()
        if self._first_failure is not None:
            raise self._first_failure

    def ask_to_stop(self) -> None:
        """Sends SIGTERM, and lets nothing start again."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def wait_stopped(self) -> None:
        """Waits until the process has ended; kills it after its grace time."""
        if self._ended.wait(self.spec.grace_s):
            return
        if self.spec.is_kill_news:
            self._report(f"{self.spec.name} did not stop within {self.spec.grace_s:.0f} s and is killed")
        self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        self._stopping.set()
        self._signal(signal.SIGKILL)
        self._ended.wait()

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)

    def _run(self) -> None:
        try:
            self._keep_running()
        finally:
            self._ended.set()

    def _keep_running(self) -> None:
        while not self._stopping.is_set():
            begin = time.monotonic()
            ending = self._run_once()
            if self._stopping.is_set() or self._first_failure is not None:
                return
            if time.monotonic() - begin >= SETTLED_S:
                self.failures_in_a_row = 0
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self.failures_in_a_row)
            self.failures_in_a_row += 1
            self._report(f"{self.spec.name} {ending}; starting it again in {pause_s:.1f} s")
            self._stopping.wait(pause_s)

    def _run_once(self) -> str:
        """Starts the process and waits for its end; returns how it ended, for people."""
        try:
            with self._lock:
                if self._stopping.is_set():
                    return "was told to stop"
                process = self._process = self.spec.start()
        except (OSError, RuntimeError) as error:
            if not self._started.is_set():
                self._first_failure = error
            return f"did not start ({error})"
        finally:
            self._started.set()
        if process.stdout is not None:
            child_logs.pump(self.spec.name, process.stdout, self._log_folder, self._echo)
        return _describe(process.wait())


def _describe(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
