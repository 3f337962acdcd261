"""Waiting that can be cancelled at any moment."""

from __future__ import annotations

import asyncio


async def wait_until_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event, `timeout_s` seconds at most; returns whether it is set.

    asyncio.wait_for would do, but before Python 3.12 it forgets a cancellation that comes in the same
    moment as the event: a task that waits in a loop would then run for ever.
    """
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiter}, timeout=timeout_s)
    finally:
        waiter.cancel()
    return event.is_set()
