"""The Builds service: asks build workers for engines, and shows how far they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from enginemesh.v1 import builds_pb2, builds_pb2_grpc, workers_pb2
from gateway.fleet import Fleet
from gateway.pages import resource_id
from mesh import build_operation, semconv, telemetry
from mesh.build_logs import BuildLogs
from mesh.bus.builds import BuildQueue
from mesh.bus.serving import ServingIndex, save
from mesh.errors import InvalidFieldError, PreconditionError
from mesh.model_file import ModelFile
from mesh.object_store import ObjectStore
from mesh.target import Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import grpc
    from google.longrunning import operations_pb2
    from redis.asyncio import Redis

    from enginemesh.v1 import targets_pb2
    from mesh.settings import GatewaySettings

    Context = grpc.aio.ServicerContext[Any, Any]

REQUEST_ID_LIMIT = 128
SPAN_NAME = "enginemesh.v1.Builds/CreateBuild"

tracer = trace.get_tracer("enginemesh.gateway")


class BuildsServicer(builds_pb2_grpc.BuildsServicer):
    """Takes build requests and streams their operations.

    Args:
        redis: Connection.
        settings: Names this gateway in traces, and the store that keeps how models are served.
    """

    def __init__(self, redis: Redis, settings: GatewaySettings) -> None:
        self._queue = BuildQueue(redis)
        self._fleet = Fleet(redis)
        self._serving = ServingIndex(redis)
        self._objects = ObjectStore.from_settings(settings)
        self._logs = BuildLogs(self._objects)
        self._gateway_id = settings.gateway_id

    async def CreateBuild(
        self, request: builds_pb2.CreateBuildRequest, context: Context
    ) -> operations_pb2.Operation:
        """See builds.proto."""
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        parent = telemetry.extract(metadata.get("traceparent", ""), metadata.get("tracestate", ""))
        # Not a producer span of its own: queueing is all that this call does.
        with tracer.start_as_current_span(SPAN_NAME, parent, kind=trace.SpanKind.SERVER) as span:
            operation = await self._create(request)
            span.set_attributes(
                {
                    semconv.BUILD: operation.name.removeprefix(f"{build_operation.COLLECTION}/"),
                    semconv.REQUEST_MODEL: request.spec.model,
                    semconv.ENGINE_KIND: request.spec.kind,
                    semconv.GATEWAY: self._gateway_id,
                }
            )
            return operation

    async def WatchBuild(
        self, request: builds_pb2.WatchBuildRequest, context: Context
    ) -> AsyncIterator[operations_pb2.Operation]:
        """See builds.proto."""
        build_id = resource_id("name", request.name, build_operation.COLLECTION)
        async for operation in self._queue.watch(build_id):
            yield operation

    async def GetBuildLog(
        self, request: builds_pb2.GetBuildLogRequest, context: Context
    ) -> builds_pb2.BuildLog:
        """See builds.proto."""
        return builds_pb2.BuildLog(text=await asyncio.to_thread(self._logs.read, request.name))

    async def _create(self, request: builds_pb2.CreateBuildRequest) -> operations_pb2.Operation:
        if len(request.request_id) > REQUEST_ID_LIMIT:
            raise InvalidFieldError("request_id", f"at most {REQUEST_ID_LIMIT} characters")
        spec = ModelFile.from_proto(request.spec)
        target = choose_target(await self._fleet.workers(), spec.kind, request.target)
        asked = spec.model_copy(update={"serving": None}).to_proto()  # no part of a build
        if request.validate_only:
            metadata = builds_pb2.BuildMetadata(spec=asked, target=target)
            checked = build_operation.succeeded("", metadata, builds_pb2.BuildResult())
            checked.name = ""
            return checked
        operation = await self._queue.create(asked, target, request.request_id, telemetry.inject())
        if spec.serving is not None:
            await save(self._objects, self._serving, spec.model, spec.serving)
        return operation


def choose_target(workers: Iterable[workers_pb2.Worker], kind: str, wanted: str) -> targets_pb2.Target:
    """The hardware to build for: the one that is wanted, or the only one that can be built for.

    Args:
        workers: All that live.
        kind: Engine kind.
        wanted: Key or name of a target; empty: any.

    Raises:
        PreconditionError: NO_BUILD_WORKER if no build worker fits, AMBIGUOUS_TARGET if several targets do.
    """
    builders = [worker for worker in workers if worker.role == workers_pb2.WORKER_ROLE_BUILD]
    able = {worker.target.key: worker.target for worker in builders if kind in worker.kinds}
    if wanted:
        able = {
            key: target for key, target in able.items() if wanted in (key, Target.from_proto(target).name)
        }
    if not able:
        what = f"kind {kind!r}" + (f" and target {wanted!r}" if wanted else "")
        there = "; ".join(_describe(worker) for worker in builders) or "none"
        raise PreconditionError(
            "NO_BUILD_WORKER",
            f"targets/{wanted or '-'}",
            f"no build worker for {what}; build workers: {there}",
            engine_kind=kind,
            target=wanted,
        )
    if len(able) > 1:
        raise PreconditionError(
            "AMBIGUOUS_TARGET",
            "targets/-",
            f"kind {kind!r} can be built for several targets; name one: {', '.join(sorted(able))}",
            engine_kind=kind,
            targets=",".join(sorted(able)),
        )
    return next(iter(able.values()))


def _describe(worker: workers_pb2.Worker) -> str:
    return f"{worker.name} builds {', '.join(worker.kinds)} for {worker.target.key}"
