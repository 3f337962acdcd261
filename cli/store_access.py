"""For commands that work on the store itself; they run where store and Redis can be reached."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from cli.failures import EXIT_TRY_AGAIN, CommandError
from cli.options import local_settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from redis.asyncio import Redis

    from mesh.engine_store import EngineStore
    from mesh.settings import ClientSettings

Result = TypeVar("Result")


def open_store(settings: ClientSettings | None = None) -> EngineStore:
    """The store of the environment's mesh, or of the local one; for reading."""
    from mesh.engine_store import EngineStore  # noqa: PLC0415 - half a second that most commands do not need
    from mesh.object_store import ObjectStore  # noqa: PLC0415 - likewise

    return EngineStore(ObjectStore.from_settings(settings or local_settings(), create_bucket=False))


def with_redis(settings: ClientSettings, work: Callable[[Redis], Awaitable[Result]]) -> Result:
    """Does some work with a connection to Redis.

    Raises:
        CommandError: Redis cannot be reached.
    """
    from mesh.bus.connection import UNREACHABLE, connect  # noqa: PLC0415 - see open_store

    async def connected() -> Result:
        redis = connect(settings.redis_url)
        try:
            return await work(redis)
        finally:
            await redis.aclose()

    try:
        return asyncio.run(connected())
    except UNREACHABLE as error:
        raise CommandError(
            f"Redis cannot be reached (ENGINEMESH_REDIS_URL): {error}", EXIT_TRY_AGAIN
        ) from error
