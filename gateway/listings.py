"""The read-only services: Models, Workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from enginemesh.v1 import (
    builds_pb2,
    models_pb2,
    models_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from gateway.fleet import ready
from gateway.pages import one, page, resource_id
from mesh.errors import NotFoundError
from mesh.model_fields import ServingSettings

if TYPE_CHECKING:
    import grpc

    from gateway.fleet import Fleet
    from gateway.waiting_room import WaitingRoom
    from mesh.bus.index import EngineIndex
    from mesh.bus.requests import RequestProducer
    from mesh.engine_store import EngineRecord

    Context = grpc.aio.ServicerContext[Any, Any]


STARTING = (workers_pb2.WORKER_STATE_FETCHING, workers_pb2.WORKER_STATE_LOADING)


class ModelsServicer(models_pb2_grpc.ModelsServicer):
    """Models with at least one engine, and how they are served."""

    def __init__(
        self, index: EngineIndex, fleet: Fleet, producer: RequestProducer, room: WaitingRoom
    ) -> None:
        self._index = index
        self._fleet = fleet
        self._producer = producer
        self._room = room

    async def GetModel(self, request: models_pb2.GetModelRequest, context: Context) -> models_pb2.Model:
        """See models.proto."""
        name = resource_id("name", request.name, "models")
        records, workers = await asyncio.gather(self._index.engines(name), self._fleet.by_model())
        if not records:
            raise NotFoundError("model", request.name)
        serving = await self._index.serving.of(name)
        return await self._model(name, records, workers.get(name, []), serving)

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        """See models.proto."""
        models, token = page(await self._models(), lambda m: m.name, request.page_size, request.page_token)
        return models_pb2.ListModelsResponse(models=models, next_page_token=token)

    async def _models(self) -> list[models_pb2.Model]:
        by_model: dict[str, list[EngineRecord]] = {}
        for record in await self._index.engines():
            by_model.setdefault(record.manifest.model, []).append(record)
        workers = await self._fleet.by_model()
        serving = await self._index.serving.all()
        return [
            await self._model(name, records, workers.get(name, []), serving.get(name, ServingSettings()))
            for name, records in sorted(by_model.items())
        ]

    async def _model(
        self,
        name: str,
        records: list[EngineRecord],
        workers: list[workers_pb2.Worker],
        serving: ServingSettings,
    ) -> models_pb2.Model:
        now = asyncio.get_running_loop().time()
        queued = await self._producer.waiting(name, [record.digest for record in records])
        requests = queued.requests + self._room.held_back(name)
        taking = ready(workers)
        model = models_pb2.Model(
            name=f"models/{name}",
            engines=len(records),
            workers=len(taking),
            state=_state(bool(taking), bool(requests)),
            queued_requests=requests,
            slots=sum(worker.slots for worker in taking),
            slots_used=sum(worker.slots_used for worker in taking),
            max_seq_len=max(record.manifest.max_seq_len for record in records),
            starting_workers=sum(worker.state in STARTING for worker in workers),
            serving=builds_pb2.ServingSettings(**serving.model_dump()),
        )
        if requests:
            oldest_s = max(queued.oldest_s, self._room.oldest_s(name, now))
            model.oldest_wait.FromMilliseconds(round(oldest_s * 1000))
        return model


def _state(is_served: bool, is_waited_for: bool) -> models_pb2.ModelState.ValueType:
    if is_served:
        return models_pb2.MODEL_STATE_READY
    if is_waited_for:
        return models_pb2.MODEL_STATE_WAITING_FOR_WORKER
    return models_pb2.MODEL_STATE_SCALED_TO_ZERO


class WorkersServicer(workers_pb2_grpc.WorkersServicer):
    """Workers that hold a lease."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def GetWorker(self, request: workers_pb2.GetWorkerRequest, context: Context) -> workers_pb2.Worker:
        """See workers.proto."""
        resource_id("name", request.name, "workers")
        return one(await self._fleet.workers(), "worker", request.name, lambda worker: worker.name)

    async def ListWorkers(
        self, request: workers_pb2.ListWorkersRequest, context: Context
    ) -> workers_pb2.ListWorkersResponse:
        """See workers.proto."""
        workers, token = page(
            await self._fleet.workers(), lambda w: w.name, request.page_size, request.page_token
        )
        return workers_pb2.ListWorkersResponse(workers=workers, next_page_token=token)
