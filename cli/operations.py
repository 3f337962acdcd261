"""Reads the long-running operations that builds are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginemesh.v1.builds_pb2 import BuildMetadata, BuildResult

if TYPE_CHECKING:
    from google.longrunning import operations_pb2


def metadata_of(operation: operations_pb2.Operation) -> BuildMetadata:
    """How far a build is."""
    metadata = BuildMetadata()
    operation.metadata.Unpack(metadata)
    return metadata


def result_of(operation: operations_pb2.Operation) -> BuildResult:
    """What a build made; empty unless it is done and went well."""
    result = BuildResult()
    operation.response.Unpack(result)
    return result
