"""A connection to a gateway, with one stub for each service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
from google.longrunning import operations_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from enginemesh.v1 import (
    builds_pb2_grpc,
    engines_pb2,
    engines_pb2_grpc,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from mesh.transport import channel_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

PAGE_SIZE = 1000
CALL_TIMEOUT_S = 15.0
DELETE_TIMEOUT_S = 60.0
"""The gateway waits for the life of a lease before it removes an engine."""

POLL_INTERVAL_S = 0.1


class Client:
    """Calls one gateway; every method may raise grpc.RpcError.

    Args:
        address: "host:port" of the gateway.
        max_message_bytes: Largest message in either direction.
    """

    def __init__(self, address: str, max_message_bytes: int) -> None:
        options = channel_options(max_message_bytes)
        if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
            options.append(("grpc.enable_http_proxy", 0))  # a proxy has another loopback than this host
        self.address = address
        self._channel = grpc.insecure_channel(address, options=options)
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)
        self.builds = builds_pb2_grpc.BuildsStub(self._channel)
        self.operations = operations_pb2_grpc.OperationsStub(self._channel)
        self._models = models_pb2_grpc.ModelsStub(self._channel)
        self._engines = engines_pb2_grpc.EnginesStub(self._channel)
        self._workers = workers_pb2_grpc.WorkersStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def models(self) -> Iterator[models_pb2.Model]:
        """Every model, by name."""
        pages = _pages(self._models.ListModels, models_pb2.ListModelsRequest(page_size=PAGE_SIZE))
        return (model for page in pages for model in page.models)

    def model(self, name: str) -> models_pb2.Model:
        """One model, by its bare name."""
        request = models_pb2.GetModelRequest(name=f"models/{name}")
        return self._models.GetModel(request, timeout=CALL_TIMEOUT_S)

    def engines(self, model: str = "") -> Iterator[engines_pb2.Engine]:
        """Every engine, newest first; of one model ("models/<model>") if named."""
        request = engines_pb2.ListEnginesRequest(page_size=PAGE_SIZE, model=model)
        return (engine for page in _pages(self._engines.ListEngines, request) for engine in page.engines)

    def delete_engine(self, name: str) -> None:
        """Removes the engine "engines/<digest>"."""
        self._engines.DeleteEngine(engines_pb2.DeleteEngineRequest(name=name), timeout=DELETE_TIMEOUT_S)

    def workers(self) -> Iterator[workers_pb2.Worker]:
        """Every worker that holds a lease, by name."""
        pages = _pages(self._workers.ListWorkers, workers_pb2.ListWorkersRequest(page_size=PAGE_SIZE))
        return (worker for page in pages for worker in page.workers)

    def ready_workers(self) -> list[workers_pb2.Worker]:
        """The inference workers that take work, by name."""
        return [
            worker
            for worker in self.workers()
            if worker.role == workers_pb2.WORKER_ROLE_INFERENCE
            and worker.state == workers_pb2.WORKER_STATE_READY
        ]

    def is_serving(self, service: str = "") -> bool:
        """Whether a model, a service, or the gateway itself ("") says by the health protocol that it serves.

        False as well when the gateway cannot be reached or does not know the name.
        """
        try:
            answer = self._health.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=CALL_TIMEOUT_S, wait_for_ready=False
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_serving(self, service: str, check: Callable[[], None]) -> None:
        """Waits until `is_serving(service)`; calls `check` in between, which raises to give up."""
        while not self.is_serving(service):
            check()
            time.sleep(POLL_INTERVAL_S)


def _pages(call: Callable[..., Any], request: Any) -> Iterator[Any]:
    while True:
        page = call(request, timeout=CALL_TIMEOUT_S)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
