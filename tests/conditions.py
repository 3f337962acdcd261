"""Waiting for conditions; nothing in the tests waits for time alone."""

from __future__ import annotations

import asyncio
import inspect

LIMIT_S = 60.0


async def until(condition, limit_s: float = LIMIT_S) -> None:
    """Returns once `condition()`, awaited if it must be, is true; fails after `limit_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return
        if loop.time() > deadline:
            raise AssertionError(f"not so within {limit_s} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(0.01)
