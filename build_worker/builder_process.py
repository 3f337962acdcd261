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
from mesh.waiting import cancel_until_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from io import FileIO

    from build_worker.child_messages import BuildTask, FetchTask
    from build_worker.limits import Excess, LimitWatch

OUTPUT_BYTES = 64 << 10
END_LIMIT_S = 1.0
"""How long a process may take to end after its answer, and its pipes to close after its end."""

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
    on_output: Callable[[bytes], None] | None = None,
    watch: LimitWatch | None = None,
) -> Fetched | Built:
    """Runs one task in a process of its own. Cancelling this kills it, with all that it has started.

    Args:
        task: What to do.
        on_progress: Called in the event loop.
        environment: Variables beside those of this process.
        on_output: Called in the event loop with what the process writes to its outputs; None: its standard
            output is dropped and its errors go to this process's.
        watch: Says when it takes too much.

    Raises:
        BuildLimitError: it took more than it may.
        MeshError: the task failed, or its process did.
    """
    stage = ""

    def note(progress: Progress) -> None:
        nonlocal stage
        stage = progress.stage.value
        on_progress(progress)

    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        try:
            process = await _start(writing, environment or {}, captures_output=on_output is not None)
        finally:
            os.close(writing)
        answer = asyncio.ensure_future(_read_outcome(pipe, note))
        excess = asyncio.ensure_future(_watch(watch, process.pid))
        output = asyncio.ensure_future(_pass_on(process.stdout, on_output))
        ending = asyncio.ensure_future(process.wait())
        try:
            assert process.stdin is not None  # noqa: S101 - asked for when it was started
            process.stdin.write(task.model_dump_json().encode())
            process.stdin.close()
            await asyncio.wait([answer, excess], return_when=asyncio.FIRST_COMPLETED)
            if not excess.done():  # it is about to end by itself, and its status may say how it went
                await asyncio.wait({ending}, timeout=END_LIMIT_S)
        finally:
            _kill_group(process)
            await asyncio.wait({ending})
            # What left the group may hold on to the pipes.
            await asyncio.wait([answer, output], timeout=END_LIMIT_S)
            await cancel_until_ended(answer, excess, output)
    if not excess.cancelled():
        raise excess.result().to_error(stage)
    outcome = None if answer.cancelled() else answer.result()
    if isinstance(outcome, Failed):
        raise ChildError(status_pb2.Status.FromString(outcome.status))
    if outcome is None:
        raise BuildError(f"the build process ended without an answer: {_describe(ending.result())}")
    return outcome


async def _watch(watch: LimitWatch | None, group: int) -> Excess:
    """Returns once the process has taken too much."""
    if watch is None:
        await asyncio.Event().wait()
    assert watch is not None  # noqa: S101 - the wait before never ends
    return await watch.until_exceeded(group)


async def _start(
    pipe: int, environment: Mapping[str, str], *, captures_output: bool
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "build_worker.build_child", str(os.getpid()), str(pipe)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE if captures_output else asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.STDOUT if captures_output else None,
        pass_fds=(pipe,),
        start_new_session=True,  # a group of its own, so that what it starts is killed with it
        env={**os.environ, **_QUIET, **environment},
    )


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kills the process and what it has left."""
    with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
        os.killpg(process.pid, signal.SIGKILL)


async def _pass_on(stream: asyncio.StreamReader | None, on_output: Callable[[bytes], None] | None) -> None:
    if stream is not None and on_output is not None:
        while data := await stream.read(OUTPUT_BYTES):
            on_output(data)


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
