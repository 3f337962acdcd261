"""Fetching an engine against the limit of this machine: `python -m benchmarks.fetch [--gigabytes 2]`.

An engine of random blobs is put into a real S3 server. Each round then does three things in turn: a process
of its own fetches the engine as a worker does (empty cache; every byte hashed, and on the disk at the end),
a C program copies the same blobs from the same server without checking or flushing anything
(benchmarks/plain_copy.c, in as many connections and as large ranges as the fetch), and the C program writes
as many bytes to the same disk and flushes them. `curl`, one blob after the other, is timed too if it is
here. The limit of a round is the slower of disk and fastest copy; only the share of it carries over to
other machines.

Prints JSON: per round and as medians, in GB/s (10^9 bytes), the share, and the peak memory of the fetch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console

from cli.embedded import start_s3
from mesh.blob_download import PARALLEL_RANGES
from mesh.engine_cache import EngineCache
from mesh.engine_store import EngineStore, blob_key
from mesh.manifest import EngineFile, Manifest, TokenizerInfo
from mesh.object_store import ObjectStore
from mesh.partial_blob import MIB, RANGE_BYTES
from mesh.settings import MeshSettings
from mesh.target import detect_cpu

if TYPE_CHECKING:
    from collections.abc import Callable

SHARES = (0.5, 0.25, 0.125, 0.125)
"""Sizes of the blobs, of the whole."""

CACHE_LIMIT_BYTES = 1 << 40
PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


class Bench:
    """One engine in a store, and the ways to get it."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self._folder = folder
        self._copies = folder / "copies"
        self.settings = MeshSettings()
        self._objects = ObjectStore.from_settings(self.settings)
        self._manifest = self._publish()
        self._program = folder / "plain_copy"
        source = Path(__file__).with_name("plain_copy.c")
        compiler = os.environ.get("CC", "cc")
        self._run([compiler, "-O2", "-pthread", "-o", str(self._program), str(source)])

    def round(self) -> dict[str, Any]:
        """Everything once."""
        figures = self._fetch()
        figures["copy_gb_s"] = self._timed(self._copy)
        if shutil.which("curl"):
            figures["curl_gb_s"] = self._timed(self._curl)
        figures["disk_gb_s"] = self._timed(self._disk)
        copies = max(figures["copy_gb_s"], figures.get("curl_gb_s", 0.0))
        figures["limit_gb_s"] = min(copies, figures["disk_gb_s"])
        figures["share"] = figures["fetch_gb_s"] / figures["limit_gb_s"]
        return {name: round(figure, 3) for name, figure in figures.items()}

    def _publish(self) -> Manifest:
        folder = self._folder / "engine"
        folder.mkdir(parents=True)
        for number, share in enumerate(SHARES):
            with (folder / f"weights-{number}").open("wb") as file:
                for _ in range(max(1, round(self.size * share / MIB))):
                    file.write(os.urandom(MIB))
        files = tuple(
            EngineFile(path=path.name, size=path.stat().st_size, sha256=_sha256(path))
            for path in sorted(folder.iterdir())
        )
        manifest = Manifest(
            model="bench",
            kind="fake",
            target=detect_cpu(),
            precision="int8",
            build_key=files[0].sha256,
            versions={},
            max_batch_size=1,
            max_seq_len=1,
            max_num_tokens=1,
            tokenizer=TokenizerInfo(file=files[0].path, vocab_size=1),
            files=files,
        )
        EngineStore(self._objects).publish(manifest, folder)
        shutil.rmtree(folder)
        self.size = manifest.size
        return manifest

    def _fetch(self) -> dict[str, float]:
        """By a process that does nothing else, so that its memory is the fetch's."""
        cache = self._folder / "cache"
        command = [sys.executable, "-m", "benchmarks.fetch", "--fetch", self._manifest.digest, str(cache)]
        try:
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE)  # noqa: S603 - built here
        finally:
            shutil.rmtree(cache, ignore_errors=True)
        told = json.loads(answer.stdout)
        return {
            "fetch_gb_s": self.size / told["seconds"] / 1e9,
            "fetch_cpu_s_per_gb": told["cpu_s"] / self.size * 1e9,
            "peak_memory_mb": told["peak_memory_bytes"] / 1e6,
        }

    def _timed(self, work: Callable[[], object]) -> float:
        """GB/s of a copy."""
        self._copies.mkdir()
        try:
            began = time.perf_counter()
            work()
            return self.size / (time.perf_counter() - began) / 1e9
        finally:
            shutil.rmtree(self._copies)

    def _copy(self) -> None:
        host, _, port = self.settings.s3_endpoint.partition(":")
        urls = [urlsplit(url) for url in self._urls()]
        jobs = "".join(
            f"{url.path}?{url.query} {file.size} {self._copies / file.sha256}\n"
            for url, file in zip(urls, self._manifest.files, strict=True)
        )
        arguments = ["copy", host, port, str(PARALLEL_RANGES), str(RANGE_BYTES)]
        self._run([str(self._program), *arguments], jobs)

    def _curl(self) -> None:
        outputs = [str(self._copies / file.sha256) for file in self._manifest.files]
        pairs = [part for url, output in zip(self._urls(), outputs, strict=True) for part in (url, output)]
        options = [
            part for url, output in zip(pairs[::2], pairs[1::2], strict=True) for part in ("-o", output, url)
        ]
        self._run(["curl", "-sSf", *options])

    def _disk(self) -> None:
        self._run([str(self._program), "disk", str(self._copies / "disk"), str(self.size)])

    def _urls(self) -> list[str]:
        return [self._objects.signed_url(blob_key(file.sha256)) for file in self._manifest.files]

    @staticmethod
    def _run(command: list[str], stdin: str = "") -> None:
        subprocess.run(command, input=stdin, check=True, text=True, stdout=subprocess.DEVNULL)  # noqa: S603 - built here


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def fetch(digest: str, cache: Path) -> None:
    """What the child does; prints how long it took."""
    store = EngineStore(ObjectStore.from_settings(MeshSettings()))
    manifest = store.manifest(digest)
    engines = EngineCache(cache, CACHE_LIMIT_BYTES)
    began, cpu_s = time.perf_counter(), time.process_time()
    engines.fetch(store, manifest)
    seconds = time.perf_counter() - began
    cpu_s = time.process_time() - cpu_s
    peak = PEAK.search(Path("/proc/self/status").read_text())
    assert peak is not None  # noqa: S101 - every Linux tells it
    told = {"seconds": seconds, "cpu_s": cpu_s, "peak_memory_bytes": int(peak[1]) << 10}
    print(json.dumps(told))  # noqa: T201 - read by the parent


def measure(folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """All rounds, and the median of each figure."""
    console = Console(stderr=True)
    console.print(f"publishing an engine of {size / 1e9:g} GB")
    bench = Bench(folder, size)
    results = []
    for number in range(rounds):
        results.append(bench.round())
        console.print(f"round {number + 1} of {rounds}: {json.dumps(results[-1])}")
    medians = {name: round(statistics.median(r[name] for r in results), 3) for name in results[0]}
    medians["peak_memory_mb"] = max(r["peak_memory_mb"] for r in results)
    return {"bytes": bench.size, **medians, "rounds": results}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path(".data/bench-fetch"))
    parser.add_argument("--fetch", nargs=2, metavar=("ENGINE", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fetch:
        fetch(options.fetch[0], Path(options.fetch[1]))
        return
    shutil.rmtree(options.data, ignore_errors=True)
    server = start_s3(options.data / "s3")
    os.environ.update(server.settings)
    try:
        result = measure(options.data.resolve() / "work", round(options.gigabytes * 1e9), options.rounds)
    finally:
        server.stop()
        shutil.rmtree(options.data, ignore_errors=True)
    results = Path("bench-results")
    results.mkdir(exist_ok=True)
    name = f"fetch-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}.json"
    (results / name).write_text(json.dumps(result))
    print(json.dumps(result, indent=2))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
