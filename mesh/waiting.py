"""Waiting that can be cancelled at any moment."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_INTERVAL_S = 1.0


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


async def cancel_until_ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks, again every CANCEL_INTERVAL_S seconds, until all have ended; their results are dropped.

    For tasks that wait in libraries: redis-py sends by asyncio.wait_for, which before Python 3.12 may forget
    a cancellation as said above, and one that is cancelled but once would then run on.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)
    await asyncio.gather(*tasks, return_exceptions=True)
