"""A build as google.longrunning.Operation: what gateways show and build workers write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.longrunning import operations_pb2
from google.protobuf import any_pb2

from enginemesh.v1 import builds_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from google.rpc import status_pb2

COLLECTION = "operations"


def unfinished(build_id: str, metadata: builds_pb2.BuildMetadata) -> operations_pb2.Operation:
    """A build that waits or runs. Sets the metadata's update time, as the others do."""
    metadata.update_time.GetCurrentTime()
    return operations_pb2.Operation(name=f"{COLLECTION}/{build_id}", metadata=_packed(metadata))


def succeeded(
    build_id: str, metadata: builds_pb2.BuildMetadata, result: builds_pb2.BuildResult
) -> operations_pb2.Operation:
    """A build that made an engine or found it."""
    metadata.stage = builds_pb2.BUILD_STAGE_DONE
    metadata.progress_percent = 100
    metadata.detail = ""
    operation = unfinished(build_id, metadata)
    operation.done = True
    operation.response.CopyFrom(_packed(result))
    return operation


def failed(
    build_id: str, metadata: builds_pb2.BuildMetadata, status: status_pb2.Status
) -> operations_pb2.Operation:
    """A build that ended without an engine; `detail` and progress stay as they were."""
    metadata.stage = builds_pb2.BUILD_STAGE_DONE
    operation = unfinished(build_id, metadata)
    operation.done = True
    operation.error.CopyFrom(status)
    return operation


def metadata_of(operation: operations_pb2.Operation) -> builds_pb2.BuildMetadata:
    """How far a build is."""
    metadata = builds_pb2.BuildMetadata()
    operation.metadata.Unpack(metadata)
    return metadata


def result_of(operation: operations_pb2.Operation) -> builds_pb2.BuildResult:
    """What a build made; empty unless it is done and went well."""
    result = builds_pb2.BuildResult()
    operation.response.Unpack(result)
    return result


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
