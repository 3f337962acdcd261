"""Health by the standard protocol: one entry per service, one per model, and "" for the process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2

from mesh import metrics, semconv
from mesh.bus.connection import UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.catalogue import Catalogue
    from gateway.fleet import Fleet

REFRESH_INTERVAL_S = 1.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Keeps the health servicer's entries true.

    A model is SERVING while a worker that takes work serves it. The process and its services are SERVING
    until the gateway drains. Tells how many workers each model has, too.
    """

    def __init__(self, services: Sequence[str], catalogue: Catalogue, fleet: Fleet) -> None:
        self.servicer = health.aio.HealthServicer()
        self._services = ("", *services)
        self._catalogue = catalogue
        self._fleet = fleet
        self._is_draining = False
        self._models: set[str] = set()

    async def open(self) -> None:
        """Says that this process serves."""
        for service in self._services:
            await self.servicer.set(service, SERVING)

    async def watch(self) -> None:
        """Keeps the models' entries up to date, for ever."""
        while not self._is_draining:
            try:
                serving = await self._fleet.serving()
                self._models.update(await self._catalogue.names())
                for model in self._models:
                    workers = len(serving.get(model, ()))
                    metrics.WORKERS.set(workers, {semconv.REQUEST_MODEL: model})
                    await self.servicer.set(model, SERVING if workers else NOT_SERVING)
            except UNREACHABLE:
                pass  # nothing is known anew; what was said last stands
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def drain(self) -> None:
        """Says, for good, that this process takes no more calls."""
        self._is_draining = True
        await self.servicer.enter_graceful_shutdown()
