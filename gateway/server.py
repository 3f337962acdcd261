"""A gateway process: two gRPC servers (clients, workers), their services, and what runs behind them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import structlog
from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from enginemesh.internal.v1 import link_pb2_grpc
from enginemesh.v1 import (
    builds_pb2,
    builds_pb2_grpc,
    engines_pb2,
    engines_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from gateway import admission
from gateway.builds import BuildsServicer
from gateway.catalogue import Catalogue
from gateway.dispatcher import Dispatcher
from gateway.engines import EnginesServicer
from gateway.fleet import Fleet
from gateway.health import Health
from gateway.inference import InferenceServicer
from gateway.interceptors import ErrorInterceptor
from gateway.links import LinksServicer
from gateway.listings import ModelsServicer, WorkersServicer
from gateway.operations import OperationsServicer
from gateway.request_table import RequestTable
from gateway.waiting_room import WaitingRoom
from mesh import transport
from mesh.build_logs import BuildLogs
from mesh.bus.connection import UNREACHABLE, connect
from mesh.bus.index import EngineIndex
from mesh.bus.leases import GATEWAY, Leases
from mesh.bus.requests import RequestProducer
from mesh.engine_removal import EngineRemover
from mesh.engine_store import EngineStore
from mesh.object_store import ObjectStore
from mesh.signing import Trust
from mesh.waiting import cancel_until_ended

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gateway.session import Session
    from mesh.settings import GatewaySettings

log = structlog.get_logger(__name__)

CLOSE_GRACE_S = 0.5
"""For the last bytes of calls that have ended, and to cancel those that outlasted the grace time."""

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    models_pb2.DESCRIPTOR.services_by_name["Models"].full_name,
    engines_pb2.DESCRIPTOR.services_by_name["Engines"].full_name,
    workers_pb2.DESCRIPTOR.services_by_name["Workers"].full_name,
    builds_pb2.DESCRIPTOR.services_by_name["Builds"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name,
)
INFRASTRUCTURE_SERVICES = (
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name,
    reflection.SERVICE_NAME,
)


class Gateway:
    """Everything that one gateway process is made of. `start`, then `stop`."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._redis = connect(settings.redis_url)
        self._leases = Leases(self._redis, GATEWAY)
        self._index = EngineIndex(self._redis)
        self._store = EngineStore(ObjectStore.from_settings(settings))
        self._trust = Trust.from_settings(settings)
        self.catalogue = Catalogue(self._index, self._store, self._trust)
        self.fleet = Fleet(self._redis)
        self.health = Health(SERVICES, self.catalogue, self.fleet)
        self.table = RequestTable()
        self._background: list[asyncio.Task[None]] = []
        self.has_failed = asyncio.Event()
        self.port = 0

    async def start(self) -> None:
        """Opens both ports and begins to serve.

        Raises:
            RuntimeError: a port is taken.
        """
        settings = self._settings
        self._link_server = grpc.aio.server(options=transport.server_options(transport.LINK_MESSAGE_BYTES))
        link_port = self._link_server.add_insecure_port(f"{settings.link_host}:{settings.link_port}")
        producer = RequestProducer(self._redis)
        self.dispatcher = Dispatcher(
            self.table,
            WaitingRoom(settings),
            producer,
            settings.gateway_id,
            settings.link_address(link_port),
        )
        self.links = LinksServicer(
            self.dispatcher, settings.gateway_id, settings.heartbeat_interval_s, settings.silence_limit_s
        )
        self.links.is_fit = self._is_fit
        link_pb2_grpc.add_LinksServicer_to_server(self.links, self._link_server)
        await self._link_server.start()

        await self.catalogue.open()
        self._run(self._renew_lease(settings.link_address(link_port)))
        self._run(self.links.watch())
        self._run(self.dispatcher.audit())
        self._run(self.catalogue.watch())
        self._run(self.health.watch())

        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=transport.server_options(settings.max_message_bytes),
        )
        self._add_services(producer)
        self.port = self._server.add_insecure_port(f"{settings.host}:{settings.port}")
        await self.health.open()
        await self._server.start()
        self._run(self.inference.watch_stalls())
        log.info("gateway ready", address=f"{settings.host}:{self.port}", id=settings.gateway_id)

    def _is_fit(self, session: Session, digest: str) -> bool:
        engine = self.catalogue.engine(session.model, digest)
        if engine is None or session.engine:  # unknown, or another one was asked for
            return False
        return admission.can_run(engine, len(session.prompt_ids), session.sampling)

    async def stop(self) -> None:
        """Drains: health first, no new requests, running streams end well within the grace time."""
        self.inference.is_draining = True
        await self.health.drain()
        # The port stays open meanwhile: closing it now would refuse new calls without saying when to retry.
        await self.table.until_empty(self._settings.drain_timeout_s)
        await self._server.stop(CLOSE_GRACE_S)
        await self.dispatcher.close()
        await cancel_until_ended(*self._background)
        await self._link_server.stop(0)
        try:
            await self._leases.release(self._settings.gateway_id)
        except UNREACHABLE as error:
            log.warning("lease not released; it will run out", error=str(error))
        await self._redis.aclose()
        log.info("gateway stopped", id=self._settings.gateway_id)

    def _add_services(self, producer: RequestProducer) -> None:
        server = self._server
        self.inference = InferenceServicer(self.catalogue, self.dispatcher, self._settings)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.inference, server)
        models = ModelsServicer(self._index, self.fleet, producer, self.dispatcher.room)
        models_pb2_grpc.add_ModelsServicer_to_server(models, server)
        remover = EngineRemover(self._store, self._redis, self._settings.lease_ttl_s)
        engines = EnginesServicer(self._index, self._trust, remover)
        engines_pb2_grpc.add_EnginesServicer_to_server(engines, server)
        workers_pb2_grpc.add_WorkersServicer_to_server(WorkersServicer(self.fleet), server)
        builds_pb2_grpc.add_BuildsServicer_to_server(BuildsServicer(self._redis, self._settings), server)
        operations = OperationsServicer(self._redis, BuildLogs(self._store.objects))
        operations_pb2_grpc.add_OperationsServicer_to_server(operations, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, server)
        channelz.add_channelz_servicer(server)
        reflection.enable_server_reflection((*SERVICES, *INFRASTRUCTURE_SERVICES), server)

    async def _renew_lease(self, address: str) -> None:
        settings = self._settings
        while True:
            try:
                await self._leases.renew(settings.gateway_id, address.encode(), settings.lease_ttl_s)
            except UNREACHABLE as error:
                log.warning("lease not renewed", error=str(error))
            await asyncio.sleep(settings.lease_ttl_s / 3)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._note_failure)
        self._background.append(task)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """A loop that ends would be missed only much later; better the whole process is replaced now."""
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed; the gateway stops", exc_info=error)
            self.has_failed.set()
