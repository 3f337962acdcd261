"""Runs build_child from an asyncio parent: one task, progress on the way, killed when it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from google.rpc import status_pb2
from typing_extensions import override

from build_worker.child_messages import LINE_LIMIT_BYTES, Built, Failed, Fetched, Message, Progress
from mesh.errors import BuildError, MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from io import FileIO

    from build_worker.child_messages import BuildTask, FetchTask

# A mesh does not report on its users: the libraries' own usage statistics are off.
_QUIET = {"NNCF_CI": "1", "CI": "true", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


class ChildError(MeshError):
    """What the child process raised, as it was."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self._status = status

    @override
    def to_status(self) -> status_pb2.Status:
        return self._status


async def run_task(
    task: FetchTask | BuildTask,
    on_progress: Callable[[Progress], None],
    environment: Mapping[str, str] | None = None,
) -> Fetched | Built:
    """Runs one task in a process of its own. Cancelling this kills the process.

    Args:
        task: What to do.
        on_progress: Called in the event loop.
        environment: Variables beside those of this process.

    Raises:
        MeshError: the task failed, or its process did.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "build_worker.build_child", str(os.getpid()), str(writing)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,  # libraries draw bars there
                pass_fds=(writing,),
                start_new_session=True,  # a group of its own, so that what it starts is killed with it
                env={**os.environ, **_QUIET, **(environment or {})},
            )
        finally:
            os.close(writing)
        try:
            assert process.stdin is not None  # noqa: S101 - asked for above
            process.stdin.write(task.model_dump_json().encode())
            process.stdin.close()
            outcome = await _read_outcome(pipe, on_progress)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
            status = await process.wait()
    if isinstance(outcome, Failed):
        raise ChildError(status_pb2.Status.FromString(outcome.status))
    if outcome is None:
        raise BuildError(f"the build process ended without an answer: {_describe(status)}")
    return outcome


async def _read_outcome(
    pipe: FileIO, on_progress: Callable[[Progress], None]
) -> Fetched | Built | Failed | None:
    """Reads until the process has closed its end; None if it never said how the task went."""
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    outcome = None
    try:
        while line := await reader.readline():
            message = Message.validate_json(line)
            if isinstance(message, Progress):
                on_progress(message)
            else:
                outcome = message
    finally:
        transport.close()
    return outcome


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}; the build worker's log may say why"
    name = signal.Signals(-status).name
    return f"{name}, as when memory runs out" if -status == signal.SIGKILL else name
