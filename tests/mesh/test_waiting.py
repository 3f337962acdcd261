"""Waiting for events."""

from __future__ import annotations

import asyncio

import pytest

from mesh.waiting import wait_until_set


async def test_set_event_and_timeout_are_told_apart():
    event = asyncio.Event()

    assert not await wait_until_set(event, 0.01)
    event.set()
    assert await wait_until_set(event, 10.0)


async def test_cancellation_in_the_moment_of_the_event_is_not_lost():
    event = asyncio.Event()
    task = asyncio.ensure_future(wait_until_set(event, 10.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the task waits now, and so does the one that it started

    event.set()
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
