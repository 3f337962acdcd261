"""`enginemesh engines`."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import GatewayOption, JsonOption, connect
from cli.tables import age, bare, enum_word, print_json, print_table, size
from enginemesh.v1 import engines_pb2


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
            extras(engine),
            size(engine.size_bytes),
            str(engine.max_seq_len),
            str(engine.max_batch_size),
            enum_word(engines_pb2.SignatureState.Name(engine.signature_state), "SIGNATURE_STATE_"),
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
        "extras",
        "size>",
        "tokens>",
        "slots>",
        "signature",
        "age>",
    )
    print_table(columns, rows, "No engines yet: make one with `enginemesh build MODEL_FILE`.")


def extras(engine: engines_pb2.Engine) -> str:
    """What is built into an engine beside its model, such as "prompt_lookup, lora tone, cache u8"."""
    words = {"speculation": "{}", "lora": "lora {}", "kv_cache_precision": "cache {}"}
    found = [text.format(engine.options[name]) for name, text in words.items() if name in engine.options]
    return ", ".join(found) or "-"
