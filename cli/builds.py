"""`enginemesh builds`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from google.longrunning import operations_pb2

from cli.build_actions import cancel, delete, log, watch
from cli.client import CALL_TIMEOUT_S, PAGE_SIZE
from cli.options import GatewayOption, JsonOption, connect
from cli.tables import age, bare, enum_word, print_json, print_table
from enginemesh.v1.builds_pb2 import BuildStage
from mesh.build_operation import metadata_of, result_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cli.client import Client


builds_group = typer.Typer(name="builds", invoke_without_command=True, rich_markup_mode="markdown")
for action in (log, watch, cancel, delete):
    builds_group.command()(action)

FilterOption = Annotated[
    str,
    typer.Option(
        "--filter",
        help="Only those with these values, as in 'done = false AND model = my-model': done, outcome, stage, "
        "model, kind, target, worker; also with !=.",
    ),
]


@builds_group.callback()
def builds(
    context: typer.Context, gateway: GatewayOption, as_json: JsonOption = False, wanted: FilterOption = ""
) -> None:
    """List the builds, running and done; `enginemesh builds log BUILD` shows what one said."""
    if context.invoked_subcommand:
        return
    with connect(gateway) as client:
        found = list(_all(client, wanted))
    if as_json:
        print_json(found)
        return
    print_table(
        ("build", "model", "kind", "target", "stage", "done>", "age>", "outcome"),
        (_row(operation) for operation in found),
        "No builds yet: start one with `enginemesh build MODEL_FILE`.",
    )


def _all(client: Client, wanted: str) -> Iterator[operations_pb2.Operation]:
    request = operations_pb2.ListOperationsRequest(name="operations", page_size=PAGE_SIZE, filter=wanted)
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
