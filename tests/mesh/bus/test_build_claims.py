"""Claims on build keys: one build at a time, and no lock that is left behind."""

from __future__ import annotations

from mesh.bus.build_claims import BuildClaims
from tests.conditions import until

KEY = "k" * 64


async def test_one_build_has_the_claim_until_it_ends_it(redis):
    claims = BuildClaims(redis, ttl_s=60.0)

    assert await claims.claim(KEY, "b1")
    assert await claims.claim(KEY, "b1")  # the next attempt of the same build
    assert not await claims.claim(KEY, "b2")
    await claims.release(KEY, "b2")  # not its own
    assert not await claims.claim(KEY, "b2")
    await claims.release(KEY, "b1")
    assert await claims.claim(KEY, "b2")


async def test_claim_that_is_not_renewed_lapses(redis):
    claims = BuildClaims(redis, ttl_s=0.2)
    await claims.claim(KEY, "dead")

    async def is_free():
        return await claims.claim(KEY, "b2")

    await until(is_free)
    await claims.release(KEY, "b2")
    assert await redis.keys("*") == []
