"""The one tree of errors; each knows the gRPC status and google.rpc details that a client sees.

Codes and details follow https://google.aip.dev/193. `reason` is stable and machine-readable; clients may
switch on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typing_extensions import override

if TYPE_CHECKING:
    from google.protobuf.message import Message

DOMAIN = "enginemesh"
MESSAGE_LIMIT_BYTES = 1000
METADATA_LIMIT_BYTES = 250
"""Beyond some 8 kB of trailers gRPC throws a status away and reports RESOURCE_EXHAUSTED in its place; a
message goes three times into them, once with every byte that is not ASCII as three."""


class MeshError(Exception):
    """Base of all errors that a client or a peer may see.

    Args:
        message: For people; names the field or limit that was broken.
        metadata: For machines; goes into ErrorInfo.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        self.message = _bounded(message, MESSAGE_LIMIT_BYTES)
        self.metadata = {key: _bounded(str(value), METADATA_LIMIT_BYTES) for key, value in metadata.items()}
        super().__init__(self.message)

    def details(self) -> list[Message]:
        """The google.rpc details beside ErrorInfo; subclasses add theirs."""
        return []

    def to_status(self) -> status_pb2.Status:
        """The error as google.rpc.Status, ErrorInfo first."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        for detail in (info, *self.details()):
            status.details.add().Pack(detail)
        return status

    def to_grpc(self) -> grpc.Status:
        """The error as `context.abort_with_status` takes it."""
        return rpc_status.to_status(self.to_status())


class InvalidFieldError(MeshError):
    """A request field is malformed or breaks a limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str, **metadata: object) -> None:
        super().__init__(f"{field}: {message}", field=field, **metadata)
        self.field = self.metadata["field"]
        self.description = _bounded(message, MESSAGE_LIMIT_BYTES)

    @override
    def details(self) -> list[Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=self.field, description=self.description
        )
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class NotFoundError(MeshError):
    """A named resource does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"

    def __init__(self, resource: str, name: str, message: str = "") -> None:
        super().__init__(message or f"no {resource} named {name!r}", resource=resource, name=name)
        self.resource = resource
        self.name = self.metadata["name"]

    @override
    def details(self) -> list[Message]:
        return [error_details_pb2.ResourceInfo(resource_type=self.resource, resource_name=self.name)]


class AlreadyExistsError(MeshError):
    """A resource of this name exists."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ALREADY_EXISTS"

    def __init__(self, resource: str, name: str) -> None:
        super().__init__(f"a {resource} named {name!r} exists already", resource=resource, name=name)


class PreconditionError(MeshError):
    """The system is not in the state that the call needs, such as an engine for other hardware."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PRECONDITION"

    def __init__(self, kind: str, subject: str, message: str, **metadata: object) -> None:
        super().__init__(message, subject=subject, **metadata)
        self.reason = kind
        self.subject = self.metadata["subject"]

    @override
    def details(self) -> list[Message]:
        violation = error_details_pb2.PreconditionFailure.Violation(
            type=self.reason, subject=self.subject, description=self.message
        )
        return [error_details_pb2.PreconditionFailure(violations=[violation])]


class _RetryableError(MeshError):
    def __init__(self, message: str, retry_after_s: float, **metadata: object) -> None:
        super().__init__(message, **metadata)
        self.retry_after_s = retry_after_s

    @override
    def details(self) -> list[Message]:
        delay = Duration()
        delay.FromMilliseconds(max(1, round(self.retry_after_s * 1000)))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class ExhaustedError(_RetryableError):
    """A limit on what may be in flight or queued is reached; try again after `retry_after_s` seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "LIMIT_REACHED"


class UnavailableError(_RetryableError):
    """The mesh cannot serve the call at this moment; try again after `retry_after_s` seconds."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class DeadlineError(MeshError):
    """The call's deadline passed; metadata says where and how many tokens were sent."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class UnsupportedError(MeshError):
    """A feature that this engine kind does not have."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED"


class AttemptsExhaustedError(MeshError):
    """Every attempt of a request failed; metadata says how many tokens were sent."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ATTEMPTS_EXHAUSTED"


class SlowConsumerError(MeshError):
    """The client did not read its stream for longer than the stall limit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SLOW_CONSUMER"


class IntegrityError(MeshError):
    """Bytes do not have the digest or signature that names them."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "INTEGRITY"


class BuildError(MeshError):
    """A build failed; metadata names the stage."""

    code = grpc.StatusCode.INTERNAL
    reason = "BUILD_FAILED"


class BuildLimitError(MeshError):
    """A build took more memory, time or disk than it may; metadata names limit, setting, value and stage."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "BUILD_LIMIT"


class BuildCancelledError(MeshError):
    """Somebody cancelled the build."""

    code = grpc.StatusCode.CANCELLED
    reason = "BUILD_CANCELLED"


def _bounded(text: str, limit: int) -> str:
    # It may quote a client, so it may be of any length, and even hold lone surrogates.
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - 3].decode(errors="ignore") + "\N{HORIZONTAL ELLIPSIS}"
