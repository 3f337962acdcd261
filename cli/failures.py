"""Turns errors into one readable line and an exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

if TYPE_CHECKING:
    from google.rpc import status_pb2

    from mesh.errors import MeshError

EXIT_FAILED = 1
EXIT_REFUSED = 2
"""The request is wrong: a field, a name, an option."""
EXIT_TRY_AGAIN = 3
"""The mesh cannot serve it now: unreachable, full, or out of time."""
EXIT_PRECONDITION = 4
"""The mesh is not in the state that the call needs, such as no engine for this hardware."""
EXIT_INTERRUPTED = 130

_EXIT_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: EXIT_REFUSED,
    grpc.StatusCode.NOT_FOUND: EXIT_REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: EXIT_REFUSED,
    grpc.StatusCode.OUT_OF_RANGE: EXIT_REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: EXIT_REFUSED,
    grpc.StatusCode.UNAVAILABLE: EXIT_TRY_AGAIN,
    grpc.StatusCode.RESOURCE_EXHAUSTED: EXIT_TRY_AGAIN,
    grpc.StatusCode.DEADLINE_EXCEEDED: EXIT_TRY_AGAIN,
    grpc.StatusCode.FAILED_PRECONDITION: EXIT_PRECONDITION,
}


class CommandError(Exception):
    """A command cannot go on; the message is for people.

    Args:
        message: What is wrong, and what to do about it.
        status: Exit status.
    """

    def __init__(self, message: str, status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.status = status


def from_rpc(error: grpc.RpcError, address: str) -> CommandError:
    """What a gRPC call ended with, its google.rpc details included."""
    call = cast("grpc.Call", error)  # what grpc raises is both
    code, message = call.code(), call.details() or ""
    status = rpc_status.from_call(call)
    if code == grpc.StatusCode.UNAVAILABLE and status is None:  # not an answer of ours: nobody there
        return CommandError(
            f"no gateway answers at {address}; "
            "start one with `enginemesh up`, or name another with --gateway",
            EXIT_TRY_AGAIN,
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED and status is None:
        message = "the time given to the call passed"  # by this end's clock; grpc's own words vary
    remarks = describe_details(status) if status is not None else []
    return CommandError(_line(code.name, message, remarks), _EXIT_STATUSES.get(code, EXIT_FAILED))


def is_not_found(error: grpc.RpcError) -> bool:
    """Whether a call ended because there is nothing of that name."""
    return cast("grpc.Call", error).code() == grpc.StatusCode.NOT_FOUND


def from_status(status: status_pb2.Status) -> CommandError:
    """What a long-running operation ended with."""
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    line = _line(code.name, status.message, describe_details(status))
    return CommandError(line, _EXIT_STATUSES.get(code, EXIT_FAILED))


def from_mesh(error: MeshError) -> CommandError:
    """What this process itself found wrong."""
    return from_status(error.to_status())


def describe_details(status: status_pb2.Status) -> list[str]:
    """The google.rpc details of a status, each in a few words; what the message says already is left out."""
    remarks: list[str] = []
    for detail in status.details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = _unpack(detail, error_details_pb2.BadRequest())
            remarks += [f"field {violation.field}" for violation in bad_request.field_violations]
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = _unpack(detail, error_details_pb2.ErrorInfo())
            remarks.append(f"reason {info.reason}")
            remarks += [
                f"{key} {value}"
                for key, value in sorted(info.metadata.items())
                if key != "field" and value and value not in status.message
            ]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = _unpack(detail, error_details_pb2.RetryInfo())
            remarks.append(f"try again in {retry.retry_delay.ToTimedelta().total_seconds():.1f} s")
    return remarks


def _unpack(detail: Any, message: Any) -> Any:
    detail.Unpack(message)
    return message


def _line(code: str, message: str, remarks: list[str]) -> str:
    words = code.replace("_", " ").lower()
    return f"{words}: {message}" + (f" ({', '.join(remarks)})" if remarks else "")
