"""Which workers live, as their leases say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginemesh.v1 import workers_pb2
from mesh.bus.leases import WORKER, Leases

if TYPE_CHECKING:
    from collections.abc import Iterable

    from redis.asyncio import Redis


class Fleet:
    """Reads the workers' leases."""

    def __init__(self, redis: Redis) -> None:
        self._leases = Leases(redis, WORKER)

    async def workers(self) -> list[workers_pb2.Worker]:
        """Every live worker, by name."""
        infos = (await self._leases.live()).values()
        return sorted((workers_pb2.Worker.FromString(info) for info in infos), key=lambda worker: worker.name)

    async def by_model(self) -> dict[str, list[workers_pb2.Worker]]:
        """Inference workers, by the model that they serve, start for or wait for."""
        by_model: dict[str, list[workers_pb2.Worker]] = {}
        for worker in await self.workers():
            if worker.role == workers_pb2.WORKER_ROLE_INFERENCE:
                by_model.setdefault(worker.model.removeprefix("models/"), []).append(worker)
        return by_model

    async def serving(self) -> dict[str, list[workers_pb2.Worker]]:
        """Inference workers that take work, by model; no model that has none."""
        by_model = {model: ready(workers) for model, workers in (await self.by_model()).items()}
        return {model: workers for model, workers in by_model.items() if workers}


def ready(workers: Iterable[workers_pb2.Worker]) -> list[workers_pb2.Worker]:
    """Those that take work."""
    return [worker for worker in workers if worker.state == workers_pb2.WORKER_STATE_READY]
