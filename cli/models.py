"""`enginemesh models`."""

from __future__ import annotations

from cli.options import GatewayOption, JsonOption, connect
from cli.tables import bare, enum_word, print_json, print_table
from enginemesh.v1.models_pb2 import Model, ModelState


def models(gateway: GatewayOption, as_json: JsonOption = False) -> None:
    """List the models that can be asked for, and how busy they are.

    Workers that still start are shown as (+N); requests that wait, with how long the first has waited.
    """
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
            _workers(model),
            f"{model.slots_used}/{model.slots}",
            _queued(model),
            str(model.max_seq_len),
        )
        for model in found
    ]
    columns = ("model", "state", "engines>", "workers>", "slots used>", "queued>", "longest sequence>")
    print_table(columns, rows, "No models yet: make one with `enginemesh build MODEL_FILE`.")


def _workers(model: Model) -> str:
    return f"{model.workers} (+{model.starting_workers})" if model.starting_workers else str(model.workers)


def _queued(model: Model) -> str:
    if not model.queued_requests:
        return "0"
    return f"{model.queued_requests} for {model.oldest_wait.ToTimedelta().total_seconds():.1f} s"
