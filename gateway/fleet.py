"""Which workers live, as their leases say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginemesh.v1 import workers_pb2
from mesh.bus.leases import WORKER, Leases

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Fleet:
    """Reads the workers' leases."""

    def __init__(self, redis: Redis) -> None:
        self._leases = Leases(redis, WORKER)

    async def workers(self) -> list[workers_pb2.Worker]:
        """Every live worker, by name."""
        infos = (await self._leases.live()).values()
        return sorted((workers_pb2.Worker.FromString(info) for info in infos), key=lambda worker: worker.name)

    async def serving(self) -> dict[str, list[workers_pb2.Worker]]:
        """Inference workers that take work, by model."""
        by_model: dict[str, list[workers_pb2.Worker]] = {}
        for worker in await self.workers():
            is_inference = worker.role == workers_pb2.WORKER_ROLE_INFERENCE
            if is_inference and worker.state == workers_pb2.WORKER_STATE_READY:
                by_model.setdefault(worker.model.removeprefix("models/"), []).append(worker)
        return by_model
