"""Leases: who exists. A process renews its own; one that stops renewing is gone after its time to live.

Expiry is by the Redis server's clock alone, so hosts whose clocks differ agree on who is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.bus import keys, scripts

if TYPE_CHECKING:
    from redis.asyncio import Redis

GATEWAY = "gateway"
WORKER = "worker"


class Leases:
    """The leases of one role.

    Args:
        redis: Connection.
        role: GATEWAY or WORKER (inference and build workers alike).
    """

    def __init__(self, redis: Redis, role: str) -> None:
        self._redis = redis
        self._keys = [keys.lease_clock(role), keys.lease_info(role)]
        self._renew = redis.register_script(scripts.RENEW_LEASE)
        self._live = redis.register_script(scripts.LIVE_LEASES)

    async def renew(self, process_id: str, info: bytes, ttl_s: float) -> None:
        """Says that `process_id` exists for `ttl_s` seconds more, and what it is."""
        await self._renew(keys=self._keys, args=[process_id, round(ttl_s * 1000), info])

    async def release(self, process_id: str) -> None:
        """Ends a lease at once."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(self._keys[0], process_id)
            pipe.hdel(self._keys[1], process_id)
            await pipe.execute()

    async def live(self) -> dict[str, bytes]:
        """Every live process and its info."""
        flat = await self._live(keys=self._keys, args=[])
        return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}

    async def is_live(self, process_id: str) -> bool:
        """Whether this process holds a lease."""
        return process_id in await self.live()
