"""Stores the log of a build while it runs, so that much of it is there also if the worker dies."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from build_worker.build_log import BuildLog
from mesh.build_logs import BuildLogs
from mesh.build_operation import COLLECTION
from mesh.errors import MeshError

if TYPE_CHECKING:
    from mesh.object_store import ObjectStore
    from mesh.settings import BuildWorkerSettings

INTERVAL_S = 1.0

log = structlog.get_logger(__name__)


class LogKeeper:
    """The log of one build.

    Args:
        objects: The store.
        build_id: Whose log.
        settings: Its limit, and what must not get into it.
    """

    def __init__(self, objects: ObjectStore, build_id: str, settings: BuildWorkerSettings) -> None:
        self._logs = BuildLogs(objects)
        self._build_id = build_id
        self._limit = settings.build_log_limit_bytes
        self._secrets = _secrets(settings)
        self.log = BuildLog(self._limit, self._secrets)

    async def go_on(self) -> None:
        """Has what earlier attempts said come first; call before anything is written."""
        try:
            earlier = await asyncio.to_thread(self._logs.read, f"{COLLECTION}/{self._build_id}")
        except MeshError:  # there is none, or the store is away: the build goes on without
            return
        self.log = BuildLog(self._limit, self._secrets, earlier)

    async def keep(self) -> None:
        """Stores the log each INTERVAL_S seconds if it has changed, until this is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self.log.has_changed:
                await self.store()

    async def store(self, engine: str = "") -> None:
        """Stores the log now, also with the engine of this digest if one is given."""
        self.log.has_changed = False
        try:
            await asyncio.to_thread(self._logs.write, self._build_id, self.log.to_bytes(), engine)
        except MeshError as error:
            self.log.has_changed = True
            log.warning("log of build not stored", build=self._build_id, error=error.message)


def _secrets(settings: BuildWorkerSettings) -> list[str]:
    return [
        settings.s3_access_key.get_secret_value(),
        settings.s3_secret_key.get_secret_value(),
        urlsplit(settings.redis_url).password or "",
        os.environ.get("HF_TOKEN", ""),  # the hub's library reads it there
    ]
