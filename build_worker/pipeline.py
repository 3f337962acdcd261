"""What happens to one build: fetch, look in the store, build, publish."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from build_worker.backends import load_builder
from build_worker.builder_process import run_task
from build_worker.child_messages import BuildTask, Built, Fetched, FetchTask, Progress
from build_worker.key import key_parts
from build_worker.stages import Stage
from build_worker.work_folder import work_folder
from enginemesh.v1 import builds_pb2
from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from build_worker.backends.base import Builder
    from mesh.bus.index import EngineIndex
    from mesh.engine_store import EngineRecord, EngineStore
    from mesh.manifest import KeyParts, Manifest
    from mesh.model_file import ModelFile
    from mesh.target import Target


class _StoppedError(Exception):
    """Ends an upload whose build was cancelled."""


@dataclass(frozen=True)
class Pipeline:
    """Runs builds, one at a time.

    Attributes:
        store: Where engines go.
        index: Where they are announced.
        target: The hardware of this host.
        root: Folder for half-made engines.
    """

    store: EngineStore
    index: EngineIndex
    target: Target
    root: Path

    async def run(self, spec: ModelFile, on_progress: Callable[[Progress], None]) -> builds_pb2.BuildResult:
        """Has the engine in store and index when it returns. Cancelling it leaves nothing half made.

        Args:
            spec: What to build.
            on_progress: Called in the event loop, first with the beginning of a stage.

        Raises:
            MeshError: why there is no engine.
        """
        builder = load_builder(spec.kind)
        check(builder, spec)
        with work_folder(self.root) as folder:
            source = await self._fetch(spec, folder, on_progress)
            parts = key_parts(source.digest, spec, self.target, builder.tool_versions())
            found = await asyncio.to_thread(self.store.find_build, parts.key)
            if found is None:
                manifest = await self._build(spec, source.path, parts, folder, on_progress)
                await self._publish(manifest, folder / "engine", on_progress)
            record = await asyncio.to_thread(self.store.record, found or manifest.digest)
        await self.index.add(record)
        return _result(record, is_cached=found is not None)

    async def _fetch(self, spec: ModelFile, folder: Path, on_progress: Callable[[Progress], None]) -> Fetched:
        on_progress(Progress(stage=Stage.FETCH, fraction=0.0, detail=spec.source))
        download = folder / "source"
        download.mkdir()
        fetched = await run_task(FetchTask(source=spec.source, folder=download), on_progress)
        assert isinstance(fetched, Fetched)  # noqa: S101 - what this task is answered with
        return fetched

    async def _build(
        self,
        spec: ModelFile,
        source: Path,
        parts: KeyParts,
        folder: Path,
        on_progress: Callable[[Progress], None],
    ) -> Manifest:
        on_progress(Progress(stage=Stage.CONVERT, fraction=0.0))
        work, output = folder / "work", folder / "engine"
        work.mkdir()
        output.mkdir()
        task = BuildTask(
            spec=spec, source=source, target=self.target, build_key=parts.key, work=work, output=output
        )
        built = await run_task(task, on_progress)
        assert isinstance(built, Built)  # noqa: S101 - what this task is answered with
        return built.manifest.model_copy(update={"key_parts": parts})

    async def _publish(
        self, manifest: Manifest, folder: Path, on_progress: Callable[[Progress], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        is_stopped = threading.Event()
        on_progress(Progress(stage=Stage.PUBLISH, fraction=0.0))

        def advance(done: int, total: int) -> None:
            if is_stopped.is_set():
                raise _StoppedError
            progress = Progress(stage=Stage.PUBLISH, fraction=done / max(1, total))
            loop.call_soon_threadsafe(on_progress, progress)

        upload = asyncio.ensure_future(asyncio.to_thread(self.store.publish, manifest, folder, advance))
        try:
            await asyncio.shield(upload)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it stops at the next part, and its files must stay until then.
            is_stopped.set()
            await asyncio.wait({upload})
            upload.exception()
            raise


def check(builder: Builder, spec: ModelFile) -> None:
    """Refuses at once what this kind cannot build.

    Raises:
        MeshError: names the field, or what is not installed.
    """
    if builder.needs_source and not spec.source:
        raise InvalidFieldError("spec.source", f"is required for kind {spec.kind}")
    builder.validate(spec)


def _result(record: EngineRecord, *, is_cached: bool) -> builds_pb2.BuildResult:
    return builds_pb2.BuildResult(
        engine=f"engines/{record.digest}",
        build_key=record.manifest.build_key,
        cached=is_cached,
        size_bytes=record.manifest.size,
    )
