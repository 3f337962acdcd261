"""google.longrunning.Operations, for builds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2

from gateway.operation_filter import OperationFilter
from gateway.pages import page, resource_id
from mesh.build_operation import COLLECTION
from mesh.bus.builds import BuildQueue
from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc
    from redis.asyncio import Redis

    from mesh.build_logs import BuildLogs

    Context = grpc.aio.ServicerContext[Any, Any]

WAIT_LIMIT_S = 3600.0
FILTER_BITE = 200
"""Builds whose states are read at once to be filtered."""

ANSWER_TIME_S = 0.2
"""A wait ends this long before its call's deadline, so that the client gets the state and no error."""


class OperationsServicer(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # it has no types
    """Shows, awaits, cancels and forgets operations. Their names are "operations/<build id>"."""

    def __init__(self, redis: Redis, logs: BuildLogs) -> None:
        self._queue = BuildQueue(redis)
        self._logs = logs

    async def GetOperation(
        self, request: operations_pb2.GetOperationRequest, context: Context
    ) -> operations_pb2.Operation:
        """The present state."""
        return await self._queue.get(_build_id(request.name))

    async def ListOperations(
        self, request: operations_pb2.ListOperationsRequest, context: Context
    ) -> operations_pb2.ListOperationsResponse:
        """A page of operations, newest first; `filter` as in gateway/operation_filter.py."""
        if request.name not in ("", COLLECTION):
            raise InvalidFieldError("name", f"must be {COLLECTION!r}, not {request.name!r}")
        wanted = OperationFilter(request.filter)
        if request.page_size < 0:
            raise InvalidFieldError("page_size", f"must not be negative, but is {request.page_size}")
        ids = await self._queue.ids()
        if wanted:
            ids = [_build_id(operation.name) for operation in await self._accepted(ids, wanted)]
        shown, token = page(ids, lambda build_id: build_id, request.page_size, request.page_token)
        return operations_pb2.ListOperationsResponse(
            operations=await self._queue.states(shown), next_page_token=token
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
        """Forgets an ended build and its log; its engine, and the log with it, stay."""
        build_id = _build_id(request.name)
        await self._queue.delete(build_id)
        await asyncio.to_thread(self._logs.delete, build_id)
        return empty_pb2.Empty()

    async def _accepted(
        self, build_ids: Sequence[str], wanted: OperationFilter
    ) -> list[operations_pb2.Operation]:
        accepted: list[operations_pb2.Operation] = []
        for start in range(0, len(build_ids), FILTER_BITE):
            states = await self._queue.states(build_ids[start : start + FILTER_BITE])
            accepted += filter(wanted.accepts, states)
        return accepted


def _build_id(name: str) -> str:
    return resource_id("name", name, COLLECTION)
