"""Builds the sample model once and keeps it, for the tests that need a real engine."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from build_worker import source
from build_worker.backends import load_builder
from build_worker.builder_process import run_task
from build_worker.child_messages import BuildTask
from build_worker.key import build_key
from cli.sample_model import fetch_sample_model
from mesh.manifest import Manifest
from mesh.model_file import ModelFile
from mesh.target import detect_cpu

SPEC = ModelFile(model="smollm2-135m-instruct", kind="openvino", source="model.gguf", precision="int8")


class SampleEngine(NamedTuple):
    """An engine on this host's disk."""

    folder: Path
    manifest: Manifest


def build_sample_engine(cache: Path) -> SampleEngine:
    """The sample model's engine in the profile `exact`, from `cache` if it was built before."""
    cache.mkdir(exist_ok=True)
    with (cache / "sample.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        return _sample_engine(cache)


def _sample_engine(cache: Path) -> SampleEngine:
    weights = fetch_sample_model(cache / "models")
    target = detect_cpu()
    digest = source.digest(weights, [], lambda _fraction: None)
    key = build_key(digest, SPEC, target, load_builder(SPEC.kind).tool_versions())
    home = cache / "engines" / key
    if not (home / "manifest.json").exists():
        cache.joinpath("engines").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache / "engines") as folder:
            _build(weights, target, key, Path(folder))
            shutil.rmtree(home, ignore_errors=True)
            Path(folder, "engine").rename(home)
    return SampleEngine(home, Manifest.model_validate_json((home / "manifest.json").read_bytes()))


def _build(weights, target, key, folder):
    work, output = folder / "work", folder / "engine"
    work.mkdir()
    output.mkdir()
    task = BuildTask(spec=SPEC, source=weights, target=target, build_key=key, work=work, output=output)
    # In a thread of its own: the one that asks may run an event loop.
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(asyncio.run, run_task(task, lambda _progress: None)).result()
    (output / "manifest.json").write_bytes(built.manifest.to_bytes())
