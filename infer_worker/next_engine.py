"""Which engine a worker should serve next, while it serves one: a newer one, or one of a model that waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infer_worker.engine_choice import choose_engine
from mesh.bus.connection import BLOCK_LIMIT_S, UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infer_worker.engine_choice import Device
    from mesh.bus.index import EngineIndex
    from mesh.bus.requests import RequestProducer
    from mesh.engine_store import EngineRecord

RETRY_DELAY_S = 0.5
LOOK_INTERVAL_S = 1.0
"""How often a worker of several models looks at their queues."""

IDLE_PATIENCE_S = 2.0
"""A worker without work leaves its model once another has had requests waiting for this long. Their own
workers, if they have any, take what waits sooner than that."""


@dataclass
class Demand:
    """Which of several models deserves a worker that serves one of them.

    Attributes:
        patience_s: A busy worker leaves once another model has had requests waiting for this long.
    """

    patience_s: float
    _waiting_since: float | None = None

    def choose(self, current: str, depths: Mapping[str, int], now: float, *, is_idle: bool) -> str:
        """The model to serve.

        Args:
            current: The one that is served.
            depths: Requests that no worker has started, by model.
            now: Seconds by any steady clock.
            is_idle: Whether the worker runs nothing.
        """
        others = {model: depth for model, depth in depths.items() if depth and model != current}
        if not others:
            self._waiting_since = None
            return current
        if self._waiting_since is None:
            self._waiting_since = now
        has_nothing_to_do = is_idle and not depths.get(current)
        limit_s = IDLE_PATIENCE_S if has_nothing_to_do else self.patience_s
        return (
            max(others, key=lambda model: others[model]) if now - self._waiting_since >= limit_s else current
        )


class NextEngine:
    """Watches the index and the queues.

    Args:
        index: Of the store.
        queues: Of the models.
        models: What this worker may serve.
        device: Where engines shall run.
        patience_s: See Demand.
    """

    def __init__(
        self,
        index: EngineIndex,
        queues: RequestProducer,
        models: Sequence[str],
        device: Device,
        patience_s: float,
    ) -> None:
        self._index = index
        self._queues = queues
        self._models = models
        self._device = device
        self._patience_s = patience_s

    async def wait(self, current: EngineRecord, is_idle: Callable[[], bool]) -> EngineRecord:
        """Returns once another engine should take the place of the present one.

        Args:
            current: The present one.
            is_idle: Whether the worker runs nothing at this moment.
        """
        demand = Demand(self._patience_s)
        timeout_s = BLOCK_LIMIT_S if len(self._models) == 1 else LOOK_INTERVAL_S
        while True:
            try:
                since = await self._index.latest_event_id()
                change = None
                while change is None:
                    found = await self._look(current, demand, is_idle)
                    if found is not None:
                        return found
                    change = await self._index.wait_for_change(since, timeout_s)
            except UNREACHABLE:
                await asyncio.sleep(RETRY_DELAY_S)

    async def _look(
        self, current: EngineRecord, demand: Demand, is_idle: Callable[[], bool]
    ) -> EngineRecord | None:
        model = current.manifest.model
        newest = choose_engine(await self._index.engines(model), self._device).record
        # An index that is being made anew may lack the newer ones for a moment.
        if newest is not None and newest.create_time > current.create_time:
            return newest
        if len(self._models) == 1:
            return None
        depths = {name: await self._queues.depth(name) for name in self._models}
        wanted = demand.choose(model, depths, asyncio.get_running_loop().time(), is_idle=is_idle())
        if wanted == model:
            return None
        return choose_engine(await self._index.engines(wanted), self._device).record
