"""Which build makes the engine of a build key, so that builds that differ in nothing else run one by one.

Two jobs may ask for the same without looking alike: the same weights at two places, say. That shows only
once a worker has read them. The first claims the key, the others wait and find its engine in the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.bus import build_scripts, keys

if TYPE_CHECKING:
    from redis.asyncio import Redis


class BuildClaims:
    """Claims on build keys; one that is not renewed lapses, so a dead worker leaves no lock behind.

    Args:
        redis: Connection.
        ttl_s: Seconds after which a claim that was not renewed lapses.
    """

    def __init__(self, redis: Redis, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._claim = redis.register_script(build_scripts.CLAIM_KEY)
        self._release = redis.register_script(build_scripts.RELEASE_KEY)

    async def claim(self, build_key: str, build_id: str) -> bool:
        """Claims a key for a build, or renews its claim; False if another build has it."""
        args: list[str | int] = [build_id, round(self.ttl_s * 1000)]
        return bool(await self._claim(keys=[keys.build_key_claim(build_key)], args=args))

    async def release(self, build_key: str, build_id: str) -> None:
        """Ends a build's claim, if it has it."""
        await self._release(keys=[keys.build_key_claim(build_key)], args=[build_id])
