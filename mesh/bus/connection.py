"""Connects to Redis or Valkey."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ClusterDownError, MasterDownError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

BLOCK_LIMIT_S = 5.0
"""Longest that a blocking read waits before it asks again."""

UNREACHABLE = (
    *(RedisConnectionError, RedisTimeoutError, OSError),
    *(ReadOnlyError, OutOfMemoryError, ClusterDownError, MasterDownError),
)
"""What redis-py raises when the server cannot be reached, does not answer, or cannot write at present."""


def connect(url: str) -> Redis:
    """A client of its own connection pool; values are bytes.

    Every answer must come within the longest blocking read plus five seconds, so that a paused server or
    a cut network shows as an error rather than as a wait without end.
    """
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=BLOCK_LIMIT_S + 5,
        socket_connect_timeout=2,
        socket_keepalive=True,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), retries=3),
        retry_on_error=[RedisConnectionError],
    )


async def describe_server(url: str) -> str:
    """Name and version of the server at `url`, for people; raises UNREACHABLE or RedisError if it refuses."""
    client = connect(url)
    try:
        info = await client.info("server")
    finally:
        await client.aclose()
    name = info.get("server_name", "redis")
    return f"{name} {info.get(f'{name}_version', info['redis_version'])}"
