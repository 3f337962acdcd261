"""Turns what handlers raise into gRPC statuses with google.rpc details, for every service alike."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from gateway.malformed import Malformed, lenient
from mesh.bus.connection import UNREACHABLE
from mesh.errors import InvalidFieldError, MeshError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call with the status of the MeshError that its handler raised.

    Unforeseen exceptions are logged whole and reach the client as INTERNAL without their text, which may
    hold what is not the client's to see. Requests that do not parse become INVALID_ARGUMENT.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        if handler.response_streaming:
            wrapped = _guard_stream(handler.unary_stream)
            make = grpc.unary_stream_rpc_method_handler
        else:
            wrapped = _guard_unary(handler.unary_unary)
            make = grpc.unary_unary_rpc_method_handler
        return make(
            wrapped,
            request_deserializer=_deserializer(handler_call_details.method, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _guard_unary(behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Any]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except Exception as error:  # noqa: BLE001 - the border to the client
            await _abort(error, context)

    return guarded


def _guard_stream(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    if inspect.isasyncgenfunction(behaviour):

        async def guarded_generator(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for message in behaviour(_checked(request), context):
                    yield message
            except Exception as error:  # noqa: BLE001 - the border to the client
                await _abort(error, context)

        return guarded_generator
    return _guard_unary(behaviour)


def _checked(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise InvalidFieldError(request.field, request.problem)
    return request


async def _abort(error: Exception, context: Context) -> None:
    if isinstance(error, UNREACHABLE):
        log.warning("redis unreachable", error=str(error))
        error = UnavailableError("the queue server cannot be reached", retry_after_s=1.0)
    elif isinstance(error, grpc.aio.AbortError | grpc.aio.UsageError):
        raise error
    elif not isinstance(error, MeshError):
        log.error("unforeseen error", exc_info=error)
        error = MeshError("internal error; the gateway's log has it")
    await context.abort_with_status(error.to_grpc())


def _deserializer(method: str, generated: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """The lenient deserialiser of our own methods' requests."""
    owner = getattr(generated, "__self__", None)
    return lenient(owner) if owner is not None and "enginemesh" in method else generated
