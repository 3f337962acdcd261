"""The read-only services: Models, Workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginemesh.v1 import (
    models_pb2,
    models_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from gateway.pages import one, page, resource_id

if TYPE_CHECKING:
    import grpc

    from gateway.fleet import Fleet
    from mesh.bus.index import EngineIndex
    from mesh.bus.requests import RequestProducer
    from mesh.engine_store import EngineRecord

    Context = grpc.aio.ServicerContext[Any, Any]


class ModelsServicer(models_pb2_grpc.ModelsServicer):
    """Models with at least one engine, and how they are served."""

    def __init__(self, index: EngineIndex, fleet: Fleet, producer: RequestProducer) -> None:
        self._index = index
        self._fleet = fleet
        self._producer = producer

    async def GetModel(self, request: models_pb2.GetModelRequest, context: Context) -> models_pb2.Model:
        """See models.proto."""
        resource_id("name", request.name, "models")
        return one(await self._models(), "model", request.name, lambda model: model.name)

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
        serving = await self._fleet.serving()
        return [
            await self._model(name, records, serving.get(name, []))
            for name, records in sorted(by_model.items())
        ]

    async def _model(
        self, name: str, records: list[EngineRecord], workers: list[workers_pb2.Worker]
    ) -> models_pb2.Model:
        return models_pb2.Model(
            name=f"models/{name}",
            engines=len(records),
            workers=len(workers),
            state=models_pb2.MODEL_STATE_READY if workers else models_pb2.MODEL_STATE_WAITING_FOR_WORKER,
            queued_requests=await self._producer.depth(name, [record.digest for record in records]),
            slots=sum(worker.slots for worker in workers),
            slots_used=sum(worker.slots_used for worker in workers),
            max_seq_len=max(record.manifest.max_seq_len for record in records),
        )


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
