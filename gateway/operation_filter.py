"""Filters of build listings: `field = value` and `field != value`, joined by AND (https://google.aip.dev/160)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from enginemesh.v1 import builds_pb2
from mesh import build_operation
from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.longrunning import operations_pb2

FILTER_LIMIT = 1024

_RESTRICTION = re.compile(r'\s*([A-Za-z_.]+)\s*(!=|=)\s*(?:"([^"\\]*)"|([^\s"()]+))\s*')
_AND = re.compile(r"AND\s", re.IGNORECASE)


def _done(operation: operations_pb2.Operation, _metadata: builds_pb2.BuildMetadata) -> str:
    return "true" if operation.done else "false"


def _outcome(operation: operations_pb2.Operation, _metadata: builds_pb2.BuildMetadata) -> str:
    if not operation.done:
        return "none"
    return "failed" if operation.HasField("error") else "succeeded"


def _stage(_operation: operations_pb2.Operation, metadata: builds_pb2.BuildMetadata) -> str:
    return builds_pb2.BuildStage.Name(metadata.stage).removeprefix("BUILD_STAGE_").lower()


FIELDS: dict[str, Callable[[operations_pb2.Operation, builds_pb2.BuildMetadata], str]] = {
    "done": _done,
    "outcome": _outcome,
    "stage": _stage,
    "model": lambda _operation, metadata: metadata.spec.model,
    "kind": lambda _operation, metadata: metadata.spec.kind,
    "target": lambda _operation, metadata: metadata.target.key,
    "worker": lambda _operation, metadata: metadata.worker.removeprefix("workers/"),
}
"""What can be filtered by. `outcome` is none, failed or succeeded; `stage` as in BuildStage."""


class OperationFilter:
    """Whether an operation is wanted.

    Args:
        text: As in a request; empty: all are wanted.

    Raises:
        InvalidFieldError: the text is no filter, or names an unknown field.
    """

    def __init__(self, text: str) -> None:
        if len(text) > FILTER_LIMIT:
            raise InvalidFieldError("filter", f"at most {FILTER_LIMIT} characters", limit=FILTER_LIMIT)
        self._wanted: list[tuple[str, bool, str]] = []
        position = 0
        while position < len(text):
            position = self._take(text, position)

    def __bool__(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self._wanted)

    def accepts(self, operation: operations_pb2.Operation) -> bool:
        """Whether this operation is wanted."""
        metadata = build_operation.metadata_of(operation)
        return all(
            (FIELDS[field](operation, metadata) == value) is is_equal
            for field, is_equal, value in self._wanted
        )

    def _take(self, text: str, position: int) -> int:
        """Reads one restriction; returns where the next one begins."""
        if self._wanted:
            joined = _AND.match(text, position)
            if joined is None:
                raise _not_a_filter(text, position)
            position = joined.end()
        match = _RESTRICTION.match(text, position)
        if match is None:
            raise _not_a_filter(text, position)
        field, comparison, quoted, bare = match.groups()
        if field not in FIELDS:
            raise InvalidFieldError("filter", f"no field {field!r}; there are {', '.join(FIELDS)}")
        value = bare if quoted is None else quoted
        if field in ("done", "outcome", "stage"):
            value = value.lower()
        self._wanted.append((field, comparison == "=", value))
        return match.end()


def _not_a_filter(text: str, position: int) -> InvalidFieldError:
    return InvalidFieldError(
        "filter", f"must look like 'done = false AND model = \"m\"'; what stands at {text[position:]!r}?"
    )
