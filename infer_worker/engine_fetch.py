"""Brings an engine to this host's cache, also while another one is served."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import structlog

from mesh import metrics, semconv
from mesh.engine_cache import EngineCache
from mesh.engine_store import EngineStore
from mesh.errors import ExhaustedError, UnavailableError
from mesh.object_store import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.manifest import Manifest
    from mesh.settings import InferWorkerSettings

log = structlog.get_logger(__name__)


class EngineFetch:
    """Fetches engines into the cache that the workers of this host share, and holds them there."""

    def __init__(self, settings: InferWorkerSettings) -> None:
        self._settings = settings
        self._cache = EngineCache(settings.data_dir / "engines", settings.cache_limit_bytes)

    async def fetch(
        self, manifest: Manifest, tell: Callable[[str], None], *, gives_way: bool = False
    ) -> Path:
        """The engine's folder, whole and checked; it stays until `release`.

        Tries again while the store cannot be reached, or engines in use leave no room.

        Args:
            manifest: The engine.
            tell: Told how far it is, or what it waits for; called in another thread too.
            gives_way: Whether other workers of this host that have nothing to serve go first.

        Raises:
            MeshError: the engine cannot be had; see EngineCache.fetch.
        """
        began = time.monotonic()
        while True:
            try:
                folder = await self._fetch_once(manifest, tell, gives_way=gives_way)
            except (UnavailableError, ExhaustedError) as error:
                log.warning("engine not fetched yet", engine=manifest.digest, error=error.message)
                tell(error.message)
                await asyncio.sleep(error.retry_after_s)
                continue
            attributes = {semconv.REQUEST_MODEL: manifest.model}
            metrics.ENGINE_FETCH_DURATION.record(time.monotonic() - began, attributes)
            return folder

    def release(self, manifest: Manifest) -> None:
        """Lets the engine be evicted when room is needed."""
        self._cache.release(manifest.digest)

    def close(self) -> None:
        """Releases all."""
        self._cache.close()

    async def _fetch_once(self, manifest: Manifest, tell: Callable[[str], None], *, gives_way: bool) -> Path:
        """Fetches in a thread, which gives up at the next progress report once this task is cancelled."""
        is_given_up = threading.Event()

        def report(done: int, total: int) -> None:
            if is_given_up.is_set():
                raise UnavailableError("the worker is stopping", 1.0)
            tell(f"{done >> 20} of {total >> 20} MiB")

        store = EngineStore(ObjectStore.from_settings(self._settings, create_bucket=False))
        try:
            return await asyncio.to_thread(self._cache.fetch, store, manifest, report, gives_way=gives_way)
        finally:
            is_given_up.set()
