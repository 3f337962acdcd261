"""`enginemesh workers`."""

from __future__ import annotations

from cli.options import GatewayOption, JsonOption, connect
from cli.tables import age, bare, enum_word, print_json, print_table
from enginemesh.v1.workers_pb2 import WorkerRole, WorkerState


def workers(gateway: GatewayOption, as_json: JsonOption = False) -> None:
    """List the workers, what each does, and why one waits."""
    with connect(gateway) as client:
        found = list(client.workers())
    if as_json:
        print_json(found)
        return
    rows = [
        (
            bare(worker.name),
            enum_word(WorkerRole.Name(worker.role), "WORKER_ROLE_"),
            enum_word(WorkerState.Name(worker.state), "WORKER_STATE_"),
            bare(worker.model) or ", ".join(worker.kinds),
            bare(worker.engine, digest=True),
            worker.target.key,
            f"{worker.slots_used}/{worker.slots}",
            f"{worker.kv_cache_usage:.0%}" if worker.HasField("kv_cache_usage") else "",
            age(worker.start_time),
            worker.detail,
        )
        for worker in found
    ]
    columns = ("worker", "role", "state", "model", "engine", "hardware", "slots>", "KV>", "up>", "detail")
    print_table(columns, rows, "No workers hold a lease.")
