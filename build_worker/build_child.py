"""The process that does the work of one build: `python -m build_worker.build_child PARENT PIPE`.

It reads one task from standard input, writes progress and the outcome to the pipe with that file
descriptor, and dies with its parent. So a build can be stopped at any moment, and neither a crash nor the
memory of a converter outlives it or reaches the worker.
"""

from __future__ import annotations

import base64
import errno
import os
import sys
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from build_worker.backends import load_builder
from build_worker.backends.base import BuildInput, ResumableBuilder
from build_worker.child_messages import BuildTask, Built, Failed, Fetched, FetchTask, Progress, Task
from build_worker.engine_folder import make_manifest
from build_worker.fetching import fetch
from build_worker.parts import PartKeeper, run_parts
from build_worker.stages import Stage
from mesh.errors import BuildError, BuildLimitError, MeshError
from mesh.parent_death import die_with_parent, guard_group
from mesh.settings import BuildWorkerSettings

if TYPE_CHECKING:
    from typing import BinaryIO

    from pydantic import BaseModel

    from build_worker.backends.base import Part

PROGRESS_INTERVAL_S = 0.1
ERROR_TEXT_LIMIT = 500


class Reporter:
    """Sends progress, at most once per PROGRESS_INTERVAL_S within a stage."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._last: tuple[Stage | None, str] = (None, "")
        self._next_time = 0.0

    def __call__(self, stage: Stage, fraction: float, detail: str = "") -> None:
        """See Report."""
        now = time.monotonic()
        if (stage, detail) != self._last or now >= self._next_time:
            self._last = (stage, detail)
            self._next_time = now + PROGRESS_INTERVAL_S
            self.send(Progress(stage=stage, fraction=fraction, detail=detail))

    def kept(self, part: Part) -> None:
        """Tells of a part that an earlier attempt has done."""
        detail = f"{part.name} was done by an earlier attempt"
        self.send(Progress(stage=part.stage, fraction=1.0, detail=detail, is_kept=True))

    def send(self, message: BaseModel) -> None:
        """Writes one line."""
        self._pipe.write(message.model_dump_json().encode() + b"\n")
        self._pipe.flush()


def run(task: FetchTask | BuildTask, settings: BuildWorkerSettings, report: Reporter) -> Fetched | Built:
    """Does one task."""
    if isinstance(task, FetchTask):
        return fetch(task, settings, report)
    return _build(task, settings, report)


def _build(task: BuildTask, settings: BuildWorkerSettings, report: Reporter) -> Built:
    builder = load_builder(task.spec.kind)
    job = BuildInput(
        task.spec, task.source, task.target, task.work, task.output, more_sources=task.more_sources
    )
    if isinstance(builder, ResumableBuilder):
        keeper = PartKeeper.at(task.scratch, task.build_key, settings) if task.scratch else None
        job = replace(job, previous=run_parts(builder, job, report, keeper, report.kept))
    else:
        report(Stage.CONVERT, 0.0)
    traits = builder.build(job, report)
    manifest = make_manifest(
        task.output,
        task.spec,
        task.target,
        build_key=task.build_key,
        versions=builder.runtime_versions(),
        traits=traits,
    )
    return Built(manifest=manifest)


def _failed(error: Exception) -> Failed:
    if isinstance(error, MemoryError):
        error = BuildLimitError("memory limit: the build worker has no more memory", limit="memory")
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = BuildLimitError("disk limit: the build worker's disk is full", limit="disk")
    elif not isinstance(error, MeshError):
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"[:ERROR_TEXT_LIMIT]
        error = BuildError(text)
    return Failed(status=base64.b64encode(error.to_status().SerializeToString()))


def main() -> None:
    """Does the task that stands on standard input."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)  # of what this process starts nothing may keep the pipe open
    guard_group(close=[descriptor])  # what converters and compilers start must not outlive the build
    with os.fdopen(descriptor, "wb") as pipe:
        report = Reporter(pipe)
        try:
            settings = BuildWorkerSettings()
            _limit_threads(settings.threads)
            report.send(run(Task.validate_json(sys.stdin.buffer.read()), settings, report))
        except Exception as error:  # noqa: BLE001 - the border to the worker
            report.send(_failed(error))


def _limit_threads(threads: int) -> None:
    """Keeps this process to as many cores: the libraries take their number of threads from it."""
    if threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


if __name__ == "__main__":
    main()
