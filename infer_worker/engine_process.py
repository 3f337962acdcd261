"""The worker's view of its engine's process: commands in, steps out, and its death seen at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from typing_extensions import override

from enginemesh.internal.v1 import engine_process_pb2
from infer_worker.child_messages import MessageReader, encode_message
from mesh.errors import PreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from enginemesh.internal.v1 import step_pb2
    from mesh.manifest import Manifest

STOP_LIMIT_S = 5.0


class EngineProcess(asyncio.Protocol):
    """One engine process. `start`, then `add` and `cancel`; the steps come by callback; `stop` at the end.

    Args:
        on_step: Called in the event loop with what each step gave.
        on_stats: Called in the event loop with statistics, about once a second while the engine works.
    """

    def __init__(
        self,
        on_step: Callable[[step_pb2.StepOutput], None],
        on_stats: Callable[[engine_process_pb2.EngineStats], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._on_step = on_step
        self._on_stats = on_stats
        self._reader = MessageReader()
        self._ready: asyncio.Future[engine_process_pb2.EngineReady] = loop.create_future()
        self._closed = asyncio.Event()
        self.last_heard = loop.time()
        """When the engine last said anything, by the loop's clock."""

    async def start(self, folder: Path, manifest: Manifest) -> engine_process_pb2.EngineReady:
        """Starts the process, and returns once the engine is loaded and warm.

        Must be called by a thread that lives as long as the engine shall: the kernel ties the process to it.

        Raises:
            PreconditionError: the engine did not load (ENGINE_LOAD_FAILED); the message says why.
        """
        ours, theirs = socket.socketpair()
        with theirs:  # the child has its own copy
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "infer_worker.engine_child"),
                *(str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
        load = engine_process_pb2.LoadEngine(folder=str(folder), manifest=manifest.to_bytes())
        self._send(engine_process_pb2.EngineCommand(load=load))
        try:
            return await asyncio.shield(self._ready)
        except BaseException:
            self.kill()  # what still loads does not look at the pair
            await self.stop()
            raise

    @property
    def process_id(self) -> int:
        """Of the engine's process, which leads a process group of its own."""
        return self._process.pid

    def add(self, sequence: engine_process_pb2.AddSequence) -> None:
        """Starts a sequence."""
        self._send(engine_process_pb2.EngineCommand(add=sequence))

    def cancel(self, sequence_id: int) -> None:
        """Ends a sequence."""
        self._send(engine_process_pb2.EngineCommand(cancel=sequence_id))

    async def died(self) -> str:
        """Returns once the process has ended or hung up, and says how."""
        await self._closed.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), 1)
        status = self._process.returncode
        if status is None:
            return "it hung up"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        """Ends the process and all it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ends the process; one that does not see the end of the pair within STOP_LIMIT_S is killed."""
        self._transport.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_LIMIT_S)
        except asyncio.TimeoutError:
            self.kill()
            await self._process.wait()

    @override
    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.last_heard = self._loop.time()
        for message in self._reader.feed(data):
            event = engine_process_pb2.EngineEvent.FromString(message)
            kind = event.WhichOneof("event")
            if kind == "step":
                self._on_step(event.step)
            elif kind == "stats":
                self._on_stats(event.stats)
            elif kind == "ready":
                self._ready.set_result(event.ready)
            elif kind == "load_error":
                self._fail_to_load(event.load_error)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._fail_to_load("its process ended before it was ready")
        self._closed.set()

    def _fail_to_load(self, why: str) -> None:
        if not self._ready.done():
            error = PreconditionError("ENGINE_LOAD_FAILED", "engine", f"the engine did not load: {why}")
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may be waiting any more

    def _send(self, command: engine_process_pb2.EngineCommand) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode_message(command))
