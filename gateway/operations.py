"""google.longrunning.Operations, for builds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2

from gateway.pages import page, resource_id
from mesh.build_operation import COLLECTION
from mesh.bus.builds import BuildQueue
from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    import grpc
    from redis.asyncio import Redis

    Context = grpc.aio.ServicerContext[Any, Any]

WAIT_LIMIT_S = 3600.0
ANSWER_TIME_S = 0.2
"""A wait ends this long before its call's deadline, so that the client gets the state and no error."""


class OperationsServicer(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # it has no types
    """Shows, awaits, cancels and forgets operations. Their names are "operations/<build id>"."""

    def __init__(self, redis: Redis) -> None:
        self._queue = BuildQueue(redis)

    async def GetOperation(
        self, request: operations_pb2.GetOperationRequest, context: Context
    ) -> operations_pb2.Operation:
        """The present state."""
        return await self._queue.get(_build_id(request.name))

    async def ListOperations(
        self, request: operations_pb2.ListOperationsRequest, context: Context
    ) -> operations_pb2.ListOperationsResponse:
        """A page of operations, newest first. There are no filters."""
        if request.name not in ("", COLLECTION):
            raise InvalidFieldError("name", f"must be {COLLECTION!r}, not {request.name!r}")
        if request.filter:
            raise InvalidFieldError("filter", "is not supported")
        if request.page_size < 0:
            raise InvalidFieldError("page_size", f"must not be negative, but is {request.page_size}")
        ids, token = page(
            await self._queue.ids(), lambda build_id: build_id, request.page_size, request.page_token
        )
        return operations_pb2.ListOperationsResponse(
            operations=await self._queue.states(ids), next_page_token=token
        )

    async def WaitOperation(
        self, request: operations_pb2.WaitOperationRequest, context: Context
    ) -> operations_pb2.Operation:
        """The state when the build has ended, or when the time is over; without `timeout` the call's own."""
        build_id = _build_id(request.name)
        limits = [WAIT_LIMIT_S]
        if request.HasField("timeout"):
            limits.append(request.timeout.ToNanoseconds() / 1e9)
        remaining = context.time_remaining()
        if remaining is not None:
            limits.append(remaining - ANSWER_TIME_S)
        return await self._queue.wait(build_id, min(limits))

    async def CancelOperation(
        self, request: operations_pb2.CancelOperationRequest, context: Context
    ) -> empty_pb2.Empty:
        """Asks for the end of a build; how it ended is seen in its operation."""
        await self._queue.cancel(_build_id(request.name))
        return empty_pb2.Empty()

    async def DeleteOperation(
        self, request: operations_pb2.DeleteOperationRequest, context: Context
    ) -> empty_pb2.Empty:
        """Forgets an ended build; its engine stays."""
        await self._queue.delete(_build_id(request.name))
        return empty_pb2.Empty()


def _build_id(name: str) -> str:
    return resource_id("name", name, COLLECTION)
