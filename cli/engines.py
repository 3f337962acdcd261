"""`enginemesh engines`."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import GatewayOption, JsonOption, connect
from cli.tables import age, bare, enum_word, print_json, print_table, size
from enginemesh.v1.engines_pb2 import SignatureState


def engines(
    gateway: GatewayOption,
    model: Annotated[str, typer.Option(help="Only this model's engines.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List the engines in the store, newest first: one for each model and kind of hardware."""
    parent = f"models/{bare(model)}" if model else ""
    with connect(gateway) as client:
        found = list(client.engines(parent))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            bare(engine.name, digest=True),
            bare(engine.model),
            engine.kind,
            engine.target.key,
            engine.precision,
            size(engine.size_bytes),
            str(engine.max_seq_len),
            str(engine.max_batch_size),
            enum_word(SignatureState.Name(engine.signature_state), "SIGNATURE_STATE_"),
            age(engine.create_time),
        )
        for engine in found
    ]
    columns = (
        "engine",
        "model",
        "kind",
        "target",
        "precision",
        "size>",
        "tokens>",
        "slots>",
        "signature",
        "age>",
    )
    print_table(columns, rows, "No engines yet: make one with `enginemesh build MODEL_FILE`.")
