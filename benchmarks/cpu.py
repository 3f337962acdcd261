"""The mesh against its own engine, on this CPU: `python -m benchmarks.cpu [--profile exact|fast]`.

One run loads the same OpenVINO engine twice: in a worker of a mesh, and alone in a process that only steps.
Both get the same prompts in turn, never at the same time. Printed and stored are tokens per second at 1 and
32 streams, their ratio, the mesh's share of the engine's own speed, and the time to first token that an
idle mesh adds. Times are wall clock on this machine; only ratios carry over to another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from cli.embedded import free_port
from cli.local_mesh import LocalMesh, Plan
from cli.sample_model import fetch_sample_model
from cli.up import SAMPLE_MODEL, build_model, wait_for_models
from enginemesh.v1 import inference_pb2, inference_pb2_grpc
from mesh.engine_cache import EngineCache
from mesh.engine_store import EngineStore
from mesh.object_store import ObjectStore
from mesh.settings import MeshSettings
from mesh.transport import channel_options

PROMPT_TOKENS = 64
MAX_TOKENS = 64
STREAMS = (1, 32)
REPEATS = 11
FIRST_TOKEN_REPEATS = 300
FIRST_TOKEN_PROMPT_TOKENS = 16
"""Few, as the engine's own time for a long prompt varies by more than the mesh adds."""
LOWEST_ID, HIGHEST_ID = 1000, 40_000
LOAD_LIMIT_S = 120.0


class EngineAlone:
    """The engine in a process that only steps."""

    def __init__(self, folder: Path, manifest: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.engine_alone", str(folder), str(manifest)]
        self._process = subprocess.Popen(  # noqa: S603 - built here
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """One batch."""
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # noqa: S101 - asked for above
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine alone ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def through_mesh(
    stub: inference_pb2_grpc.InferenceStub, model: str, prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    """The same batch over gRPC."""
    began = time.perf_counter()

    async def one(prompt: list[int]) -> tuple[float, list[int]]:
        request = inference_pb2.GenerateRequest(
            model=model,
            token_ids={"ids": prompt},
            sampling={"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            return_token_ids=True,
        )
        first, tokens = 0.0, []
        async for message in stub.Generate(request):
            if message.delta.token_ids:
                first = first or time.perf_counter() - began
                tokens += message.delta.token_ids
        return first, tokens

    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return {
        "seconds": time.perf_counter() - began,
        "first_token_s": [first for first, _ in answers],
        "tokens": [tokens for _, tokens in answers],
    }


async def measure(alone: EngineAlone, address: str, model: str, console: Console) -> dict[str, Any]:
    """Every batch on both, each first in every other round: what one leaves in the caches harms the other."""
    rounds: list[dict[str, Any]] = []
    source = random.Random(1)  # noqa: S311 - prompts, no secrets
    async with grpc.aio.insecure_channel(address, options=channel_options(16 << 20)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        plan = [(streams, MAX_TOKENS) for _ in range(REPEATS) for streams in STREAMS]
        plan += [(1, 2)] * FIRST_TOKEN_REPEATS
        for number, (streams, max_tokens) in enumerate([(1, 2), (max(STREAMS), 8), *plan]):
            length = PROMPT_TOKENS if max_tokens == MAX_TOKENS else FIRST_TOKEN_PROMPT_TOKENS
            prompts = [
                [source.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)] for _ in range(streams)
            ]
            results: dict[str, dict[str, Any]] = {}
            for who in ("mesh", "engine") if number % 2 else ("engine", "mesh"):
                if who == "mesh":
                    results[who] = await through_mesh(stub, model, prompts, max_tokens)
                else:
                    results[who] = await asyncio.to_thread(alone.run, prompts, max_tokens)
            rounds.append({"streams": streams, "max_tokens": max_tokens, **results})
            if max_tokens == MAX_TOKENS:
                rates = {who: _rate(rounds[-1], who) for who in ("mesh", "engine")}
                console.print(
                    f"  {streams:3} streams: mesh {rates['mesh']:.0f}, engine {rates['engine']:.0f} tokens/s"
                )
    return {"rounds": rounds[2:]}  # the first two warmed both up


def summarise(result: dict[str, Any]) -> dict[str, float]:
    """The figures that count, from the raw rounds."""
    rounds = result["rounds"]
    firsts = [r for r in rounds if r["max_tokens"] != MAX_TOKENS]

    def median_rate(who: str, streams: int) -> float:
        return statistics.median(
            _rate(r, who) for r in rounds if r["streams"] == streams and r["max_tokens"] == MAX_TOKENS
        )

    def median_share(streams: int) -> float:
        chosen = [r for r in rounds if r["streams"] == streams and r["max_tokens"] == MAX_TOKENS]
        return statistics.median(_rate(r, "mesh") / _rate(r, "engine") for r in chosen)

    def first_token(who: str) -> float:
        return statistics.median(r[who]["first_token_s"][0] for r in firsts)

    added = [r["mesh"]["first_token_s"][0] - r["engine"]["first_token_s"][0] for r in firsts]
    many = max(STREAMS)
    equal = [r["mesh"]["tokens"] == r["engine"]["tokens"] for r in rounds]
    return {
        "mesh_tokens_per_s_1": median_rate("mesh", 1),
        f"mesh_tokens_per_s_{many}": median_rate("mesh", many),
        f"ratio_{many}_to_1": median_rate("mesh", many) / median_rate("mesh", 1),
        "share_of_engine_1": median_share(1),
        f"share_of_engine_{many}": median_share(many),
        "first_token_engine_ms": first_token("engine") * 1000,
        "first_token_mesh_ms": first_token("mesh") * 1000,
        "first_token_added_ms": statistics.median(added) * 1000,
        "rounds_with_equal_tokens": sum(equal) / len(equal),
    }


def _rate(round_: dict[str, Any], who: str) -> float:
    return sum(len(tokens) for tokens in round_[who]["tokens"]) / round_[who]["seconds"]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=["exact", "fast"], default="exact")
    parser.add_argument("--data", type=Path, default=Path(".data/bench-cpu"))
    options = parser.parse_args()
    console = Console(stderr=True)
    source = fetch_sample_model(options.data / "sources")
    name = f"smollm2-{options.profile}"
    model = SAMPLE_MODEL.model_copy(update={"model": name, "options": {"profile": options.profile}})
    plan = Plan(options.data, free_port(), model.kind, (name,), 1, (source.parent,))
    with LocalMesh(plan, console.print) as mesh:
        build_model(mesh, model, console)
        wait_for_models(mesh, plan.models, console)
        settings = MeshSettings(**_settings(mesh))
        store = EngineStore(ObjectStore.from_settings(settings))
        manifest = store.engines(name)[0].manifest
        folder = EngineCache(options.data / "alone", 50 << 30).fetch(store, manifest)
        (options.data / "manifest.json").write_bytes(manifest.to_bytes())
        alone = EngineAlone(folder, options.data / "manifest.json")
        try:
            result = uvloop.run(measure(alone, mesh.address, name, console))
        finally:
            alone.close()
    report(options.profile, result)


def report(profile: str, result: dict[str, Any]) -> None:
    """Prints the figures and keeps the raw data."""
    summary = summarise(result)
    table = Table(
        "figure", "value", title=f"OpenVINO, profile {profile}, {PROMPT_TOKENS} in, {MAX_TOKENS} out"
    )
    for figure, value in summary.items():
        table.add_row(figure, f"{value:.3f}")
    Console(stderr=True).print(table)
    folder = Path("bench-results")
    folder.mkdir(exist_ok=True)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    path = folder / f"cpu-{profile}-{stamp}.json"
    path.write_text(json.dumps({"profile": profile, "summary": summary, **result}))
    print(json.dumps({"profile": profile, **summary, "raw": str(path)}))  # noqa: T201 - the result


def _settings(mesh: LocalMesh) -> dict[str, str]:
    prefix = "ENGINEMESH_"
    return {
        name.removeprefix(prefix).lower(): value
        for name, value in mesh.environment.items()
        if name.startswith(prefix)
    }


if __name__ == "__main__":
    main()
