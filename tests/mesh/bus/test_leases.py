"""A lease lives as long as its holder renews it, by the server's clock."""

from __future__ import annotations

import time

import pytest

from mesh.bus.leases import GATEWAY, WORKER, Leases
from tests.conditions import until


@pytest.fixture
def leases(redis):
    return Leases(redis, WORKER)


async def test_live_gives_every_holder_and_its_latest_info(leases):
    await leases.renew("w1", b"one", 60)
    await leases.renew("w2", b"two", 60)
    await leases.renew("w1", b"one again", 60)

    assert await leases.live() == {"w1": b"one again", "w2": b"two"}
    assert await leases.is_live("w1")
    assert not await leases.is_live("w3")


async def test_lease_that_is_not_renewed_ends_and_leaves_nothing(redis, leases):
    await leases.renew("gone", b"", 0.05)
    await until(lambda: _is_gone(leases, "gone"))

    assert await redis.keys("*") == []


async def test_renewed_lease_outlives_its_first_time(leases):
    await leases.renew("short", b"", 0.2)
    await leases.renew("kept", b"", 0.2)
    await leases.renew("kept", b"", 60)
    await until(lambda: _is_gone(leases, "short"))

    assert await leases.is_live("kept")


async def test_many_leases_end_at_once(leases):
    async with leases._redis.pipeline() as pipe:
        pipe.zadd(leases._keys[0], {f"w{number}": 1 for number in range(20_000)})
        pipe.hset(leases._keys[1], mapping={f"w{number}": b"" for number in range(20_000)})
        await pipe.execute()

    assert await leases.live() == {}


async def test_released_lease_ends_at_once(leases):
    await leases.renew("w1", b"", 60)
    await leases.release("w1")
    await leases.release("w1")  # harmless to repeat

    assert await leases.live() == {}


async def test_roles_are_apart(redis, leases):
    await leases.renew("p1", b"", 60)

    assert await Leases(redis, GATEWAY).live() == {}


async def test_clock_of_the_client_does_not_matter(leases, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    await leases.renew("w1", b"", 60)

    assert await leases.is_live("w1")


async def _is_gone(leases: Leases, process_id: str) -> bool:
    return not await leases.is_live(process_id)
