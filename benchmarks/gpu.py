"""One model on this GPU three ways: `python -m benchmarks.gpu --shape tinyllama-1.1b [--serve] ...`.

The same weights are built into an engine and then stand loaded side by side: in a worker of a mesh (gateways,
Valkey and worker as processes), alone in a process that only steps vLLM's engine core, and behind
`vllm serve`. Each takes a share of the GPU's memory; they get the same prompts in turn, never at the same
time. Clients are processes of their own. Weights are random: they cost the same time as trained ones.

Every figure is wall clock on this machine. The raw data goes to --out as JSON after each round, so that a run
that is cut short leaves what it measured.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.cpu import EngineAlone
from benchmarks.gpu_models import SHAPES, make_model
from cli.embedded import free_port
from cli.local_mesh import LocalMesh, Plan
from cli.options import connect
from cli.up import build_model, wait_for_models
from mesh.engine_cache import EngineCache
from mesh.engine_store import EngineStore
from mesh.model_file import ModelFile
from mesh.nvml import all_gpus
from mesh.object_store import ObjectStore
from mesh.settings import MeshSettings
from mesh.versions import vllm_versions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.manifest import Manifest

PROMPT_TOKENS, MAX_TOKENS = 512, 256
LOWEST_ID = 3
START_AHEAD_S = 0.3
SERVE_LIMIT_S = 300.0
PERCENTILES = (50, 90, 95, 99)


class Clients:
    """Processes that each run a share of the streams."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_client"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
            for _ in range(count)
        ]

    def run(self, who: str, addresses: list[str], model: str, prompts: list[list[int]]) -> dict[str, Any]:
        """All streams together; clients share the addresses evenly."""
        start = time.time() + START_AHEAD_S
        busy = self._processes[: len(prompts)]
        for at, process in enumerate(busy):
            job = {
                "who": who,
                "address": addresses[at % len(addresses)],
                "model": model,
                "prompts": prompts[at :: len(busy)],
                "max_tokens": MAX_TOKENS,
                "start": start,
            }
            assert process.stdin is not None  # noqa: S101 - asked for above
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        arrivals: list[list[tuple[float, int]]] = []
        for process in busy:
            assert process.stdout is not None  # noqa: S101 - asked for above
            arrivals += json.loads(process.stdout.readline())["arrivals"]
        return summarise(arrivals)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.communicate()


def summarise(arrivals: list[list[tuple[float, int]]]) -> dict[str, Any]:
    """Rates and percentiles of one round; each stream is a list of (seconds, tokens)."""
    tokens = sum(count for stream in arrivals for _, count in stream)
    seconds = max(stream[-1][0] for stream in arrivals)
    gaps = [
        (later[0] - earlier[0]) / later[1]
        for stream in arrivals
        for earlier, later in itertools.pairwise(stream)
        for _ in range(later[1])
    ]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_stream": tokens / seconds / len(arrivals),
        "first_token_ms": _percentiles([stream[0][0] for stream in arrivals]),
        "per_token_ms": _percentiles(gaps),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {f"p{p}": round(1000 * ordered[min(last, round(p / 100 * last))], 3) for p in PERCENTILES}


class Serve:
    """`vllm serve` with its own HTTP front, its caches empty at first."""

    def __init__(self, checkpoint: Path, folder: Path, options: argparse.Namespace) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "vllm-serve.log").open("wb")
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)),
            *("--served-model-name", "served", "--port", self.address.rpartition(":")[2]),
            *("--max-model-len", str(PROMPT_TOKENS + MAX_TOKENS + 16), "--max-num-seqs", str(options.batch)),
            *("--max-num-batched-tokens", str(options.num_tokens)),
            *("--gpu-memory-utilization", str(options.memory), "--disable-log-stats"),
            *(("--kv-cache-dtype", "fp8") if options.kv_precision == "fp8" else ()),
        ]
        caches = {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TRITON_CACHE_DIR": str(folder / "triton")}
        environment = {**os.environ, **caches, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
        began = time.monotonic()
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)  # noqa: S603
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{self.address}/health", timeout=1)
                break
            if self._process.poll() is not None or time.monotonic() - began > SERVE_LIMIT_S:
                raise RuntimeError(f"vllm serve did not start; see {self._log.name}")
            time.sleep(0.1)
        self.start_s = time.monotonic() - began

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(60)


@contextlib.contextmanager
def more_gateways(mesh: LocalMesh, count: int, model: str) -> Iterator[list[str]]:
    """The mesh's gateway and `count` processes beside it, when they serve; gives all addresses."""
    ports = [free_port() for _ in range(count)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "gateway.main"],
            env={**os.environ, **mesh.environment, "ENGINEMESH_PORT": str(port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in ports
    ]
    try:
        for port, process in zip(ports, processes, strict=True):
            with connect(f"127.0.0.1:{port}") as client:
                client.wait_until_serving(model, lambda process=process: _must_run(process))
        yield [mesh.address, *(f"127.0.0.1:{port}" for port in ports)]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def _must_run(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise RuntimeError(f"a gateway ended with status {process.returncode}")


def alone_round(alone: EngineAlone, prompts: list[list[int]]) -> dict[str, Any]:
    """The same figures of the engine core in a process that only steps."""
    answer = alone.run(prompts, MAX_TOKENS)
    tokens = sum(len(one) for one in answer["tokens"])
    seconds, first = answer["seconds"], answer["first_token_s"]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_stream": tokens / seconds / len(prompts),
        "first_token_ms": _percentiles(first),
        "mean_per_token_ms": 1000 * statistics.mean((seconds - at) / (MAX_TOKENS - 1) for at in first),
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    return {
        "gpu": gpu,
        "target": all_gpus()[0].target.key,
        "cpus": os.cpu_count(),
        "versions": vllm_versions(),
    }


def run(options: argparse.Namespace, result: dict[str, Any], save: Any) -> None:
    """Builds, starts and measures; fills `result`."""
    console = Console(stderr=True, width=140)
    folder = options.data.resolve()
    source = folder / "sources" / options.shape
    if not source.exists():
        make_model(options.shape, source)
    spec = ModelFile(
        model=f"{options.shape}-{options.precision}".replace("_", "-"),
        kind="vllm",
        source=options.shape,
        precision=options.precision,
        kv_cache_precision=options.kv_precision,
        max_batch_size=options.batch,
        max_seq_len=PROMPT_TOKENS + MAX_TOKENS + 16,
        max_num_tokens=options.num_tokens,
        options={"gpu_memory_utilization": str(options.memory)},
    )
    plan = Plan(folder, free_port(), spec.kind, (spec.model,), 1, (source.parent,))
    with LocalMesh(plan, console.print) as mesh, contextlib.ExitStack() as stack:
        began = time.monotonic()
        build_model(mesh, spec, console)
        result["build_s"] = time.monotonic() - began
        began = time.monotonic()
        wait_for_models(mesh, plan.models, console)
        result["worker_start_s"] = time.monotonic() - began
        settings = {name.removeprefix("ENGINEMESH_").lower(): v for name, v in mesh.environment.items()}
        store = EngineStore(ObjectStore.from_settings(MeshSettings(**settings)))  # type: ignore[arg-type]
        manifest = store.engines(spec.model)[0].manifest
        result["engine"] = _describe(manifest)
        save()
        engine = EngineCache(folder / "alone", 1 << 40).fetch(store, manifest)
        (folder / "manifest.json").write_bytes(manifest.to_bytes())
        ways = {"mesh": stack.enter_context(more_gateways(mesh, options.gateways - 1, spec.model))}
        with ThreadPoolExecutor() as pool:
            starting = pool.submit(EngineAlone, engine, folder / "manifest.json")
            if options.serve:
                serving = folder / "serve"
                serving.mkdir(exist_ok=True)
                serve = Serve(_checkpoint_with_tokenizer(engine, source, serving / "model"), serving, options)
                stack.callback(serve.close)
                result["vllm_serve_start_s"] = serve.start_s
                ways["http"] = [serve.address]
            alone = starting.result()
        stack.callback(alone.close)
        save()
        clients = Clients(options.clients)
        stack.callback(clients.close)
        measure(alone, clients, ways, spec.model, options, result, save, console)


def measure(  # noqa: PLR0917 - a plain list of what takes part
    alone: EngineAlone,
    clients: Clients,
    ways: dict[str, list[str]],
    model: str,
    options: argparse.Namespace,
    result: dict[str, Any],
    save: Any,
    console: Console,
) -> None:
    """Every number of streams, every way, in turn; the first round only warms up."""
    source = random.Random(1)  # noqa: S311 - prompts, no secrets
    vocabulary = SHAPES[options.shape]["vocab_size"]
    rounds = result["rounds"] = []
    for repeat in range(options.repeats + 1):
        for streams in options.streams if repeat else [max(options.streams)]:
            prompts = [
                [source.randrange(LOWEST_ID, vocabulary) for _ in range(PROMPT_TOKENS)]
                for _ in range(streams)
            ]
            round_ = {"streams": streams, "repeat": repeat, "alone": alone_round(alone, prompts)}
            for who, addresses in ways.items():
                name = model if who == "mesh" else "served"
                round_[who] = clients.run(who, addresses, name, prompts)
            rates = {who: round(round_[who]["tokens_per_s"]) for who in ("alone", *ways)}
            console.print(f"{streams:4} streams, round {repeat}: {rates} tokens/s")
            if repeat:
                rounds.append(round_)
                save()


def _describe(manifest: Manifest) -> dict[str, Any]:
    files = {file.path: file.size for file in manifest.files}
    return {"digest": manifest.digest, "bytes": manifest.size, "files": files, "options": manifest.options}


def _checkpoint_with_tokenizer(engine: Path, source: Path, folder: Path) -> Path:
    """The engine's weights as `vllm serve` wants them: with the tokenizer beside them."""
    folder.mkdir(exist_ok=True)
    for path in (engine / "checkpoint").iterdir():
        (folder / path.name).symlink_to(path.resolve())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--kv-precision", default="")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--memory", type=float, default=0.28, help="share of the GPU for each of the three")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--serve", action="store_true", help="measure `vllm serve` too")
    parser.add_argument("--data", type=Path, default=Path(".data/bench-gpu"))
    parser.add_argument("--out", type=Path, default=Path("bench-results/gpu.json"))
    options = parser.parse_args()
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # the engine alone answers on standard output
    result: dict[str, Any] = {"options": asked, "machine": machine()}
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1))

    run(options, result, save)


if __name__ == "__main__":
    main()
