"""`enginemesh models`."""

from __future__ import annotations

from cli.options import GatewayOption, JsonOption, connect
from cli.tables import bare, enum_word, print_json, print_table
from enginemesh.v1.models_pb2 import ModelState


def models(gateway: GatewayOption, as_json: JsonOption = False) -> None:
    """List the models that can be asked for, and how busy they are."""
    with connect(gateway) as client:
        found = list(client.models())
    if as_json:
        print_json(found)
        return
    rows = [
        (
            bare(model.name),
            enum_word(ModelState.Name(model.state), "MODEL_STATE_"),
            str(model.engines),
            str(model.workers),
            f"{model.slots_used}/{model.slots}",
            str(model.queued_requests),
            str(model.max_seq_len),
        )
        for model in found
    ]
    columns = ("model", "state", "engines>", "workers>", "slots used>", "queued>", "longest sequence>")
    print_table(columns, rows, "No models yet: make one with `enginemesh build MODEL_FILE`.")
