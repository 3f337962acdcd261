"""The engine's own process: `python -m infer_worker.engine_child FD PARENT`.

A step may hold the GIL for long, and some engines abort their process when they fail; here neither harms
the worker's links. The process ends with its worker: the kernel kills it when its parent dies, and the end
of the socketpair ends its loop. What the engine itself has started ends with it.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from enginemesh.internal.v1 import engine_process_pb2
from infer_worker.backends import backend_class
from infer_worker.child_pair import Pair
from mesh.manifest import Manifest
from mesh.parent_death import die_with_parent, guard_group

if TYPE_CHECKING:
    from infer_worker.backends.base import EngineBackend

STATS_INTERVAL_S = 1.0


class EngineChild:
    """Runs one engine for the worker at the other end of the pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._stats_due = 0.0
        self._is_told_idle = True

    def run(self) -> None:
        """Loads the engine that the first command names, then: take in, step, publish, until told to end."""
        commands = self._first_commands()
        if not commands:
            return
        self._engine = self._load(commands.pop(0).load)
        while self._pair.is_open:
            self._take_in(commands)
            if self._engine.has_work() and not self._pair.is_congested:
                self._publish()
            commands = self._pair.receive(self._patience_s())

    def _first_commands(self) -> list[engine_process_pb2.EngineCommand]:
        commands: list[engine_process_pb2.EngineCommand] = []
        while not commands and self._pair.is_open:
            commands = self._pair.receive(None)
        return commands

    def _load(self, command: engine_process_pb2.LoadEngine) -> EngineBackend:
        try:
            manifest = Manifest.model_validate_json(command.manifest)
            engine = backend_class(manifest.kind)()
            began = time.monotonic_ns()
            limits = engine.load(Path(command.folder), manifest)
            loaded = time.monotonic_ns()
            engine.warm_up()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._pair.send(engine_process_pb2.EngineEvent(load_error=message))
            self._pair.drain()
            raise
        ready = engine_process_pb2.EngineReady(
            slots=limits.slots,
            max_seq_len=limits.max_seq_len,
            load_us=(loaded - began) // 1000,
            warm_up_us=(time.monotonic_ns() - loaded) // 1000,
        )
        self._pair.send(engine_process_pb2.EngineEvent(ready=ready))
        return engine

    def _take_in(self, commands: list[engine_process_pb2.EngineCommand]) -> None:
        for command in commands:
            if command.HasField("add"):
                self._engine.add(command.add)
            elif command.HasField("cancel"):
                self._engine.cancel(command.cancel)

    def _publish(self) -> None:
        output = self._engine.step()
        if output.ids or output.finishes:
            self._pair.send(engine_process_pb2.EngineEvent(step=output))
        self._is_told_idle = False

    def _patience_s(self) -> float | None:
        """How long to wait for a command; tells the statistics on the way if they are due.

        While it steps they also show that the engine lives, though a long prefill gives no tokens.
        """
        now = time.monotonic()
        is_idle = not self._engine.has_work()
        if now >= self._stats_due and not self._is_told_idle:
            self._pair.send(engine_process_pb2.EngineEvent(stats=self._engine.stats()))
            self._stats_due = now + STATS_INTERVAL_S
            self._is_told_idle = is_idle
        if not is_idle and not self._pair.is_congested:
            return 0.0
        return None if self._is_told_idle else max(0.0, self._stats_due - now)


def main() -> None:
    """Entry point; the arguments are the pair's file descriptor and the worker's process id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    # The worker decides when to stop: what ends a whole session or container reaches it as well.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        guard_group(close=[descriptor])  # an engine may have processes of its own, such as one per GPU
        EngineChild(Pair(connection)).run()


if __name__ == "__main__":
    main()
