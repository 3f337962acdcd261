"""What faults and bad clients cost: `python -m benchmarks.reliability [pauses|cancels|stall|overload]...`.

All on the fake engine (10 ms steps), so the figures are the mesh's alone:

pauses    32 streams on two workers, one of which is killed or stopped: the longest gap between two tokens.
cancels   10,000 requests, each cancelled after its first token: memory before and after, what is left.
stall     64 streams, one of which stops reading: the speed of the others, the gateway's memory.
overload  arrivals at 90 % of capacity, then at 200 %: time to first token of what is accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import redis
from rich.console import Console

from cli.embedded import free_port
from cli.local_mesh import LocalMesh, Plan
from cli.up import build_model, wait_for_models
from enginemesh.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2, workers_pb2
from mesh.model_file import ModelFile
from mesh.transport import channel_options

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_LIMIT_S = 120.0
STEP_MS = 10
STREAMS = 32
PAUSE_TOKENS = 400
CANCELS, CANCELS_AT_ONCE, CANCELS_WARM_UP = 10_000, 64, 2_000
STALL_STREAMS, STALL_TOKENS = 64, 600
OVERLOAD_SLOTS, OVERLOAD_TOKENS, OVERLOAD_S = 16, 20, {0.9: 60.0, 2.0: 120.0}
QUIET_LIMIT_S = 60.0


class Bench:
    """One running mesh and a client of it."""

    def __init__(self, mesh: LocalMesh, model: str, channel: grpc.aio.Channel) -> None:
        self.mesh = mesh
        self._model = model
        self.stub = inference_pb2_grpc.InferenceStub(channel)

    def request(self, tokens: int, prompt: str = "hello") -> inference_pb2.GenerateRequest:
        """A greedy request for so many tokens."""
        sampling = sampling_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        return inference_pb2.GenerateRequest(
            model=self._model, prompt=prompt, sampling=sampling, return_token_ids=True
        )

    async def arrivals(self, tokens: int, prompt: str = "hello") -> list[float]:
        """One answer: when each message came, in seconds since the call."""
        began = time.perf_counter()
        call = self.stub.Generate(self.request(tokens, prompt), timeout=CALL_LIMIT_S)
        return [time.perf_counter() - began async for message in call if message.HasField("delta")]

    def workers(self) -> list[workers_pb2.Worker]:
        """Inference workers that are ready."""
        with self.mesh.client() as client:
            return client.ready_workers()

    async def until_ready(self, count: int) -> list[workers_pb2.Worker]:
        """Waits for so many ready workers with free slots only."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        while True:
            workers = await asyncio.to_thread(self.workers)
            if len(workers) == count and not any(worker.slots_used for worker in workers):
                return workers
            if time.monotonic() > deadline:
                raise RuntimeError(f"not quiet: {workers}")
            await asyncio.sleep(0.1)

    def memory(self) -> dict[str, int]:
        """Resident bytes by process."""
        found = {}
        for name, child in self.mesh.processes.items():
            if child.process_id and name.startswith(("gateway", "worker")):
                found[name] = psutil.Process(child.process_id).memory_info().rss
        return found

    def entries(self) -> int:
        """Entries in all request streams."""
        with redis.Redis.from_url(self.mesh.environment["ENGINEMESH_REDIS_URL"]) as client:
            return sum(client.xlen(key) for key in client.scan_iter(match="em:{m:*", _type="stream"))


async def pauses(bench: Bench) -> dict[str, Any]:
    """The longest gap that any of 32 streams sees when its worker is lost."""
    result: dict[str, Any] = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        victim = (await bench.until_ready(2))[0].process_id
        tasks = [asyncio.ensure_future(bench.arrivals(PAUSE_TOKENS, f"{n}")) for n in range(STREAMS)]
        await asyncio.sleep(PAUSE_TOKENS * STEP_MS / 1000 / 2)
        os.kill(victim, number)
        answers = await asyncio.gather(*tasks)
        if number == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
        gaps = [max(b - a for a, b in itertools.pairwise(times)) for times in answers]
        result[f"{number.name}_longest_pause_ms"] = max(gaps) * 1000
        result[f"{number.name}_gaps_ms"] = [gap * 1000 for gap in gaps]
    return result


async def cancels(bench: Bench) -> dict[str, Any]:
    """Memory of gateway and worker before and after 10,000 cancellations."""
    await bench.until_ready(1)
    limit = asyncio.Semaphore(CANCELS_AT_ONCE)

    async def one() -> None:
        async with limit:
            call = bench.stub.Generate(bench.request(1000), timeout=CALL_LIMIT_S)
            await call.read()
            call.cancel()

    await asyncio.gather(*(one() for _ in range(CANCELS_WARM_UP)))
    await bench.until_ready(1)
    before = bench.memory()
    await asyncio.gather(*(one() for _ in range(CANCELS)))
    await bench.until_ready(1)
    after = bench.memory()
    growth = {name: (after[name] - before[name]) / 2**20 for name in before}
    return {"cancelled": CANCELS, "growth_mib": growth, "entries_left": bench.entries()}


async def stall(bench: Bench) -> dict[str, Any]:
    """The speed of 63 streams beside one that does not read, against 64 that all do."""
    await bench.until_ready(1)

    async def speed(streams: int) -> float:
        began = time.perf_counter()
        answers = await asyncio.gather(*(bench.arrivals(STALL_TOKENS, f"{n}") for n in range(streams)))
        del answers
        return STALL_TOKENS / (time.perf_counter() - began)

    undisturbed = await speed(STALL_STREAMS)
    before = bench.memory()["gateway"]
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    async with grpc.aio.insecure_channel(bench.mesh.address, options=options) as channel:
        stalled = inference_pb2_grpc.InferenceStub(channel).Generate(bench.request(100_000))
        beside = await speed(STALL_STREAMS - 1)
        grown = bench.memory()["gateway"] - before
        stalled.cancel()
    return {"share_of_speed": beside / undisturbed, "gateway_grows_mib": grown / 2**20}


async def overload(bench: Bench) -> dict[str, Any]:
    """Time to first token at 90 % of capacity, and of what is accepted at 200 %."""
    await bench.until_ready(1)
    capacity = OVERLOAD_SLOTS / (OVERLOAD_TOKENS * STEP_MS / 1000)
    result: dict[str, Any] = {"capacity_per_s": capacity}
    for load, seconds in OVERLOAD_S.items():
        first: list[float] = []
        refused: list[float] = []
        other: list[str] = []

        async def one(first=first, refused=refused, other=other) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - binds this round's lists
            began = time.perf_counter()
            try:
                first.append((await bench.arrivals(OVERLOAD_TOKENS))[0])
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                    refused.append(time.perf_counter() - began)
                else:
                    other.append(str(error.code()))

        chance, tasks = random.Random(1), []  # noqa: S311 - arrivals, no secrets
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            tasks.append(asyncio.ensure_future(one()))
            await asyncio.sleep(chance.expovariate(load * capacity))
        await asyncio.gather(*tasks)
        result[f"load_{load}"] = {
            "accepted": len(first),
            "refused": len(refused),
            "other_errors": other,
            "first_token_p50_ms": statistics.median(first) * 1000,
            "first_token_p99_ms": _percentile(first, 99) * 1000,
            "refusal_p99_ms": _percentile(refused, 99) * 1000 if refused else None,
        }
    ratio = result["load_2.0"]["first_token_p99_ms"] / result["load_0.9"]["first_token_p99_ms"]
    return {**result, "p99_ratio": ratio}


# Name to measurement, workers, slots, and settings that differ from the defaults.
MEASUREMENTS = {
    "pauses": (pauses, 2, 64, {}),
    "cancels": (cancels, 1, 64, {}),
    "stall": (stall, 1, 64, {}),
    "overload": (
        overload,
        1,
        OVERLOAD_SLOTS,
        {"ENGINEMESH_QUEUE_WINDOW": "4", "ENGINEMESH_MAX_QUEUE_S": "0.1"},
    ),
}


@contextlib.contextmanager
def running(workers: int, slots: int, settings: dict[str, str]) -> Iterator[tuple[LocalMesh, str]]:
    """A mesh of the fake engine."""
    console = Console(quiet=True)
    model = ModelFile(model="fake", kind="fake", max_batch_size=slots, options={"step_ms": str(STEP_MS)})
    with tempfile.TemporaryDirectory(prefix="enginemesh-bench-") as folder:
        plan = Plan(Path(folder), free_port(), "fake", (model.model,), workers, ())
        with LocalMesh(plan, console.print, environment=dict(settings)) as mesh:
            build_model(mesh, model, console)
            wait_for_models(mesh, plan.models, console)
            yield mesh, model.model


async def measure(mesh: LocalMesh, model: str, name: str) -> dict[str, Any]:
    """One measurement on a running mesh."""
    async with grpc.aio.insecure_channel(mesh.address, options=channel_options(16 << 20)) as channel:
        return await MEASUREMENTS[name][0](Bench(mesh, model, channel))


def main() -> None:
    """Runs the named measurements, all by default; prints one JSON object per measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="{" + ",".join(MEASUREMENTS) + "}")
    names = parser.parse_args().names or list(MEASUREMENTS)
    if unknown := set(names) - set(MEASUREMENTS):
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    for name in names:
        _, workers, slots, settings = MEASUREMENTS[name]
        with running(workers, slots, settings) as (mesh, model):
            result = asyncio.run(measure(mesh, model, name))
        folder = Path("bench-results")
        folder.mkdir(exist_ok=True)
        (folder / f"reliability-{name}.json").write_text(json.dumps(result))
        shown = {key: value for key, value in result.items() if not isinstance(value, list)}
        print(json.dumps({"measurement": name, **shown}), flush=True)  # noqa: T201 - the result


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else values[0]


if __name__ == "__main__":
    main()
