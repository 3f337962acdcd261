"""What happens to one build: fetch, look in the store, build, publish."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from build_worker import publisher
from build_worker.backends import load_builder
from build_worker.builder_process import run_task
from build_worker.child_messages import BuildTask, Built, Fetched, FetchTask, Progress, ScratchPlace
from build_worker.key import key_parts
from build_worker.limits import LimitWatch
from build_worker.scratch import Scratch
from build_worker.stages import Stage
from build_worker.work_folder import work_folder
from enginemesh.v1 import builds_pb2
from mesh.bus.connection import UNREACHABLE
from mesh.waiting import cancel_until_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from build_worker.build_log import BuildLog
    from mesh.bus.build_claims import BuildClaims
    from mesh.bus.index import EngineIndex
    from mesh.engine_store import EngineRecord, EngineStore
    from mesh.manifest import KeyParts, Manifest
    from mesh.model_file import ModelFile
    from mesh.settings import BuildWorkerSettings
    from mesh.target import Target

CLAIM_INTERVAL_S = 0.3


class _StoppedError(Exception):
    """Ends an upload whose build was cancelled."""


@dataclass(frozen=True)
class BuildRun:
    """One attempt of a build.

    Attributes:
        build_id: Which build.
        attempt: 1 for the first.
        spec: What to build.
        log: Takes what the tools say.
        on_progress: Called in the event loop, first with the beginning of a stage.
    """

    build_id: str
    attempt: int
    spec: ModelFile
    log: BuildLog
    on_progress: Callable[[Progress], None]


@dataclass(frozen=True)
class Pipeline:
    """Runs builds, one at a time.

    Attributes:
        store: Where engines go.
        index: Where they are announced.
        claims: Lets one of those that make the same engine run.
        target: The hardware of this host.
        settings: Limits.
    """

    store: EngineStore
    index: EngineIndex
    claims: BuildClaims
    target: Target
    settings: BuildWorkerSettings
    root: Path = field(init=False)
    """Folder for half-made engines."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.settings.data_dir / "builds")

    async def run(self, run: BuildRun) -> builds_pb2.BuildResult:
        """Has the engine in store and index when it returns. Cancelling it leaves no process and no file.

        Raises:
            MeshError: why there is no engine.
        """
        builder = load_builder(run.spec.kind)
        builder.validate(run.spec)
        with work_folder(self.root) as folder:
            making = _Making(self, run, folder)
            fetched = await making.fetch()
            parts = key_parts(
                fetched.digest, run.spec, self.target, builder.tool_versions(), fetched.more_digests
            )
            run.log.say(f"build key {parts.key}")
            async with self._claimed(parts.key, run) as waited_s:
                making.watch.leave_out(waited_s)
                found = await asyncio.to_thread(self.store.find_build, parts.key)
                if found is None:
                    manifest = await making.build(fetched, parts)
                    await making.publish(manifest)
                record = await asyncio.to_thread(self.store.record, found or manifest.digest)
        await self.index.add(record)
        return _result(record, is_cached=found is not None)

    @asynccontextmanager
    async def _claimed(self, key: str, run: BuildRun) -> AsyncIterator[float]:
        """Only one build makes the engine of a key at a time; the others wait here and then find it.

        Yields:
            Seconds that it waited.
        """
        waiting_since = None
        while not await self._claim(key, run):
            if waiting_since is None:
                waiting_since = time.monotonic()
                run.log.say("another build makes the same engine: waiting for its end")
                detail = "another build makes the same engine"
                run.on_progress(Progress(stage=Stage.FETCH, fraction=1.0, detail=detail))
            await asyncio.sleep(CLAIM_INTERVAL_S)
        renewal = asyncio.ensure_future(self._renew(key, run))
        try:
            yield time.monotonic() - waiting_since if waiting_since else 0.0
        finally:
            await cancel_until_ended(renewal)
            with suppress(*UNREACHABLE):  # it lapses
                await self.claims.release(key, run.build_id)

    async def _claim(self, key: str, run: BuildRun) -> bool:
        try:
            return await self.claims.claim(key, run.build_id)
        except UNREACHABLE:  # at worst an engine is made twice, which harms nobody
            return True

    async def _renew(self, key: str, run: BuildRun) -> None:
        while True:
            await asyncio.sleep(self.claims.ttl_s / 3)
            await self._claim(key, run)


class _Making:
    """The stages of one attempt, in its folder."""

    def __init__(self, pipeline: Pipeline, run: BuildRun, folder: Path) -> None:
        self._pipeline = pipeline
        self._run = run
        self._folder = folder
        self.watch = LimitWatch(pipeline.settings, folder)
        self._scratch = ScratchPlace(
            build_id=run.build_id,
            limit_bytes=pipeline.settings.build_scratch_limit_bytes,
            is_retry=run.attempt > 1,
        )
        (folder / "tmp").mkdir()

    async def fetch(self) -> Fetched:
        """Makes the sources readable here."""
        spec = self._run.spec
        self._run.on_progress(Progress(stage=Stage.FETCH, fraction=0.0, detail=spec.source))
        more = {name: place for name, place in spec.sources.items() if name != "source"}
        fetched = await self._run_task(
            FetchTask(
                source=spec.source,
                folder=self._make("source"),
                more_sources=more,
                scratch=self._scratch,
            )
        )
        assert isinstance(fetched, Fetched)  # noqa: S101 - what this task is answered with
        return fetched

    async def build(self, fetched: Fetched, parts: KeyParts) -> Manifest:
        """Makes the engine's files."""
        self._run.on_progress(Progress(stage=Stage.CONVERT, fraction=0.0))
        built = await self._run_task(
            BuildTask(
                spec=self._run.spec,
                source=fetched.path,
                target=self._pipeline.target,
                build_key=parts.key,
                work=self._make("work"),
                output=self._make("engine"),
                more_sources=fetched.more_paths,
                scratch=self._scratch,
            )
        )
        assert isinstance(built, Built)  # noqa: S101 - what this task is answered with
        return built.manifest.model_copy(update={"key_parts": parts})

    async def publish(self, manifest: Manifest) -> None:
        """Uploads them."""
        loop = asyncio.get_running_loop()
        is_stopped = threading.Event()
        on_progress = self._run.on_progress
        on_progress(Progress(stage=Stage.PUBLISH, fraction=0.0))

        def advance(done: int, total: int) -> None:
            if is_stopped.is_set():
                raise _StoppedError
            if excess := self.watch.time_excess():
                raise excess.to_error(Stage.PUBLISH.value)
            progress = Progress(stage=Stage.PUBLISH, fraction=done / max(1, total))
            loop.call_soon_threadsafe(on_progress, progress)

        store, scratch = self._pipeline.store, Scratch(self._pipeline.store.objects, self._run.build_id)
        upload = asyncio.ensure_future(
            asyncio.to_thread(publisher.publish, store, scratch, manifest, self._folder / "engine", advance)
        )
        try:
            await asyncio.shield(upload)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it stops at the next part, and its files must stay until then.
            is_stopped.set()
            await asyncio.wait({upload})
            upload.exception()
            raise

    async def _run_task(self, task: FetchTask | BuildTask) -> Fetched | Built:
        environment = {"TMPDIR": str(self._folder / "tmp")}
        return await run_task(
            task, self._run.on_progress, environment, on_output=self._run.log.write, watch=self.watch
        )

    def _make(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir()
        return path


def _result(record: EngineRecord, *, is_cached: bool) -> builds_pb2.BuildResult:
    return builds_pb2.BuildResult(
        engine=f"engines/{record.digest}",
        build_key=record.manifest.build_key,
        cached=is_cached,
        size_bytes=record.manifest.size,
    )
