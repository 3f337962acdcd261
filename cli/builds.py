"""`enginemesh builds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.longrunning import operations_pb2

from cli.client import CALL_TIMEOUT_S, PAGE_SIZE
from cli.options import GatewayOption, JsonOption, connect
from cli.tables import age, bare, enum_word, print_json, print_table
from enginemesh.v1.builds_pb2 import BuildStage
from mesh.build_operation import metadata_of, result_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cli.client import Client


def builds(gateway: GatewayOption, as_json: JsonOption = False) -> None:
    """List the builds, running and done."""
    with connect(gateway) as client:
        found = list(_all(client))
    if as_json:
        print_json(found)
        return
    print_table(
        ("build", "model", "kind", "target", "stage", "done>", "age>", "outcome"),
        (_row(operation) for operation in found),
        "No builds yet: start one with `enginemesh build MODEL_FILE`.",
    )


def _all(client: Client) -> Iterator[operations_pb2.Operation]:
    request = operations_pb2.ListOperationsRequest(name="operations", page_size=PAGE_SIZE)
    while True:
        page = client.operations.ListOperations(request, timeout=CALL_TIMEOUT_S)
        yield from page.operations
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _row(operation: operations_pb2.Operation) -> tuple[str, ...]:
    metadata = metadata_of(operation)
    if operation.HasField("error"):
        outcome = operation.error.message
    elif operation.done:
        result = result_of(operation)
        outcome = bare(result.engine, digest=True) + (" (in the store already)" if result.cached else "")
    else:
        outcome = metadata.detail
    return (
        bare(operation.name),
        metadata.spec.model,
        metadata.spec.kind,
        metadata.target.key,
        enum_word(BuildStage.Name(metadata.stage), "BUILD_STAGE_"),
        f"{metadata.progress_percent} %",
        age(metadata.create_time),
        outcome,
    )
