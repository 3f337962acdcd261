"""The process that does the work of one build: `python -m build_worker.build_child PARENT PIPE`.

It reads one task from standard input, writes progress and the outcome to the pipe with that file
descriptor, and dies with its parent. So a build can be stopped at any moment, and neither a crash nor the
memory of a converter outlives it or reaches the worker.
"""

from __future__ import annotations

import base64
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

from build_worker import source
from build_worker.backends import load_builder
from build_worker.backends.base import BuildInput
from build_worker.child_messages import BuildTask, Built, Failed, Fetched, FetchTask, Progress, Task
from build_worker.engine_folder import make_manifest
from build_worker.stages import Stage
from mesh.errors import BuildError, MeshError
from mesh.parent_death import die_with_parent
from mesh.settings import BuildWorkerSettings

if TYPE_CHECKING:
    from typing import BinaryIO

    from pydantic import BaseModel

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

    def send(self, message: BaseModel) -> None:
        """Writes one line."""
        self._pipe.write(message.model_dump_json().encode() + b"\n")
        self._pipe.flush()


def run(task: FetchTask | BuildTask, report: Reporter) -> Fetched | Built:
    """Does one task."""
    if isinstance(task, FetchTask):
        return _fetch(task, report)
    return _build(task, report)


def _fetch(task: FetchTask, report: Reporter) -> Fetched:
    settings = BuildWorkerSettings()
    report(Stage.FETCH, 0.0, task.source)
    path = source.fetch(
        task.source,
        settings,
        task.folder,
        lambda fraction: report(Stage.FETCH, 0.8 * fraction, "downloading"),
    )
    digest = source.digest(
        path,
        settings.source_root_list,
        lambda fraction: report(Stage.FETCH, 0.8 + 0.2 * fraction, "reading weights"),
    )
    return Fetched(path=path, digest=digest)


def _build(task: BuildTask, report: Reporter) -> Built:
    builder = load_builder(task.spec.kind)
    report(Stage.CONVERT, 0.0)
    traits = builder.build(BuildInput(task.spec, task.source, task.target, task.work, task.output), report)
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
    if not isinstance(error, MeshError):
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"[:ERROR_TEXT_LIMIT]
        error = BuildError(text)
    return Failed(status=base64.b64encode(error.to_status().SerializeToString()))


def main() -> None:
    """Does the task that stands on standard input."""
    die_with_parent(int(sys.argv[1]))
    with os.fdopen(int(sys.argv[2]), "wb") as pipe:
        report = Reporter(pipe)
        try:
            settings = BuildWorkerSettings()
            _limit_threads(settings.threads)
            report.send(run(Task.validate_json(sys.stdin.buffer.read()), report))
        except Exception as error:  # noqa: BLE001 - the border to the worker
            report.send(_failed(error))


def _limit_threads(threads: int) -> None:
    """Keeps this process to as many cores: the libraries take their number of threads from it."""
    if threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


if __name__ == "__main__":
    main()
