"""`enginemesh chaos`."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import grpc
import redis
import typer
from rich.console import Console
from rich.table import Table

from cli.chaos_clients import Clients, Tally
from cli.chaos_faults import FAULTS, draw
from cli.client import POLL_INTERVAL_S
from cli.embedded import free_port
from cli.failures import EXIT_REFUSED, CommandError
from cli.interrupts import terminated_like_interrupted
from cli.local_mesh import LocalMesh, Plan
from cli.sample_model import fetch_sample_model
from cli.up import SAMPLE_MODEL, build_model, wait_for_models
from enginemesh.v1 import inference_pb2_grpc, workers_pb2
from mesh.model_file import ModelFile
from mesh.transport import channel_options

FAKE_MODEL = ModelFile(model="chaos", kind="fake", max_batch_size=16, options={"step_ms": "5"})
PAUSE_BETWEEN_FAULTS_S = (0.5, 3.0)
QUIET_LIMIT_S = 30.0
# A gateway is held up for longer than the pings of a usual client wait.
PATIENCE = {"grpc.keepalive_timeout_ms": 30_000, "grpc.http2.ping_timeout_ms": 30_000}
REQUEST_KEYS = "em:{m:*"
# More attempts than a request meets faults; how many a production mesh should make is another question.
SETTINGS = {"ENGINEMESH_MAX_ATTEMPTS": "20", "ENGINEMESH_DRAIN_TIMEOUT_S": "5"}


def chaos(
    *,
    seed: Annotated[int, typer.Option(help="Of faults and clients; the same seed draws the same.")] = 1,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults go on.")] = 1.0,
    kind: Annotated[
        str, typer.Option(help="Engine kind; others than fake and openvino need --engine.")
    ] = "fake",
    engine: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="A reproducible engine that `export` wrote, to run."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", min=2)] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Break a mesh on purpose while clients stream, and check every promise from outside.

    Starts a mesh of its own, in a folder of its own. Workers and engines are killed, stopped and drained,
    the gateway is held up, Redis is paused, restarted and emptied, while clients read, read slowly, cancel
    and run into deadlines. Every answer must be the undisturbed one, token for token, with one end, in
    time; and nothing may be left when it is over. Exits with 1 on any violation.

    **Examples**

    `enginemesh chaos --seed 1 --minutes 10`

    `enginemesh chaos --kind openvino --workers 2 --streams 8`

    `enginemesh chaos --kind tensorrt_llm --engine exported/`
    """
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="enginemesh-chaos-") as folder, terminated_like_interrupted():
        data = Path(folder)
        plan, spec = _plan(data, kind, engine, workers)
        mesh = LocalMesh(plan, lambda line: console.print(line, style="dim"), environment=dict(SETTINGS))
        with mesh:
            if spec is not None:
                build_model(mesh, spec, console)
            if engine is not None:
                from cli.local_import import import_into  # noqa: PLC0415 - see cli/store_access.py

                import_into(mesh, engine)
            wait_for_models(mesh, plan.models, console)
            report = asyncio.run(_Run(mesh, plan.models[0], seed, streams, console).run(minutes * 60))
    if as_json:
        typer.echo(json.dumps(report))
    _print(report, Console())
    if report["violations"]:
        raise CommandError(f"{len(report['violations'])} violations; replay with --seed {seed}")


def _plan(data: Path, kind: str, engine: Path | None, workers: int) -> tuple[Plan, ModelFile | None]:
    """What to start, and what to build in it."""
    if engine is not None:
        from cli.local_import import manifest_of  # noqa: PLC0415 - see cli/store_access.py

        manifest = manifest_of(engine, kind)
        return Plan(data, free_port(), kind, (manifest.model,), workers, has_builder=False), None
    spec = FAKE_MODEL
    roots: tuple[Path, ...] = ()
    if kind == SAMPLE_MODEL.kind:
        spec, roots = SAMPLE_MODEL, (fetch_sample_model(data / "sources").parent,)
    elif kind != FAKE_MODEL.kind:
        raise CommandError(f"chaos has no model of kind {kind}: give an engine with --engine", EXIT_REFUSED)
    return Plan(data, free_port(), kind, (spec.model,), workers, roots), spec


class _Run:
    """One run against one mesh."""

    def __init__(self, mesh: LocalMesh, model: str, seed: int, streams: int, console: Console) -> None:
        self._mesh = mesh
        self._model = model
        self._seed = seed
        self._streams = streams
        self._console = console
        self._played: Counter[str] = Counter()

    async def run(self, seconds: float) -> dict[str, Any]:
        """Streams and faults for so long, then the look at what is left."""
        options = list({**dict(channel_options(16 << 20)), **PATIENCE}.items())
        async with grpc.aio.insecure_channel(self._mesh.address, options=options) as channel:
            clients = Clients(
                inference_pb2_grpc.InferenceStub(channel),
                self._model,
            )
            await clients.learn()
            self._console.print(f"faults for {seconds:.0f} s, seed {self._seed}, {self._streams} streams")
            deadline = time.monotonic() + seconds
            asking = [
                asyncio.ensure_future(self._ask(clients, random.Random(f"{self._seed} {n}"), deadline))
                for n in range(self._streams)
            ]
            await asyncio.to_thread(self._break, deadline)
            await asyncio.gather(*asking)
        left = await asyncio.to_thread(self._what_is_left)
        return self._report(clients.tally, left)

    async def _ask(self, clients: Clients, chance: random.Random, deadline: float) -> None:
        while time.monotonic() < deadline:
            await clients.ask(chance)

    def _break(self, deadline: float) -> None:
        chance = random.Random(self._seed)
        while time.monotonic() < deadline:
            time.sleep(chance.uniform(*PAUSE_BETWEEN_FAULTS_S))
            fault = draw(chance)
            self._console.print(f"  {fault.name}", style="dim")
            try:
                fault.play(self._mesh, chance)
            except redis.ConnectionError:
                continue  # an earlier fault is not over: Redis is being started again
            self._played[fault.name] += 1

    def _what_is_left(self) -> list[str]:
        """Promise 3, from outside; empty once everything is gone."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        left = ["not looked at"]
        while left and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
            try:
                left = [*self._entries_left(), *self._slots_left()]
            except (grpc.RpcError, redis.RedisError) as error:
                left = [str(error)]
        return left

    def _entries_left(self) -> list[str]:
        with redis.Redis.from_url(self._mesh.environment["ENGINEMESH_REDIS_URL"]) as client:
            streams = list(client.scan_iter(match=REQUEST_KEYS, _type="stream"))
            return [f"{key.decode()}: {size} entries" for key in streams if (size := client.xlen(key))]

    def _slots_left(self) -> list[str]:
        with self._mesh.client() as client:
            workers = [w for w in client.workers() if w.role == workers_pb2.WORKER_ROLE_INFERENCE]
            used = [f"{w.name}: {w.slots_used} slots in use" for w in workers if w.slots_used]
            queued = [f"{m.name}: {m.queued_requests} queued" for m in client.models() if m.queued_requests]
            if len(workers) != self._mesh.plan.workers:
                used.append(f"{len(workers)} workers of {self._mesh.plan.workers}")
            return used + queued

    def _report(self, tally: Tally, left: list[str]) -> dict[str, Any]:
        deaths = sum(self._played[fault.name] for fault in FAULTS if fault.is_death)
        return {
            "seed": self._seed,
            "requests": tally.requests,
            "finished": tally.finished,
            "cancelled": tally.cancelled,
            "expired": tally.expired,
            "moves": tally.moves,
            "longest_pause_s": round(tally.longest_pause_s, 3),
            "faults": dict(self._played),
            "worker_deaths": deaths,
            "violations": tally.violations + [f"left behind: {what}" for what in left],
        }


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"chaos, seed {report['seed']}", show_header=False)
    for name, count in sorted(report["faults"].items()):
        table.add_row(name, str(count))
    table.add_section()
    for name in ("requests", "finished", "cancelled", "expired", "moves", "longest_pause_s", "worker_deaths"):
        table.add_row(name.replace("_", " "), str(report[name]))
    violations = report["violations"]
    table.add_row("violations", str(len(violations)), style="bold red" if violations else "bold green")
    console.print(table)
    for violation in violations[:20]:
        console.print(f"  {violation}", style="red", markup=False)
