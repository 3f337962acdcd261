"""Waiting for events."""

from __future__ import annotations

import asyncio

import pytest

from mesh import waiting
from mesh.waiting import cancel_until_ended, wait_until_set


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


async def test_task_that_forgets_a_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(waiting, "CANCEL_INTERVAL_S", 0.05)
    forgotten = 0

    async def forget_twice():
        nonlocal forgotten
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                forgotten += 1
                if forgotten > 2:
                    raise

    task = asyncio.ensure_future(forget_twice())
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError("not of interest"))
    await asyncio.sleep(0)
    await cancel_until_ended(task, failed)
    assert task.cancelled()
    assert forgotten == 3
