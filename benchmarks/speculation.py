"""What speculation and a built-in adapter gain or cost: `python -m benchmarks.speculation [--draft PATH]`.

SmolLM2 is built four times, plain, with prompt lookup, with a draft model and with a LoRA adapter, and each
batch runs on all of them in turn, in this process. `copy` asks for a text that stands in the prompt; `free`
lets the model tell a story. Per engine, prompts and streams: tokens per second, that over plain's, processor
time per token, which other programs on the machine disturb less, tokens that a step gives to a sequence, the
share of guesses that were right, and of answers that are plain's.

There is no small model of SmolLM2's vocabulary to be had, so the draft is SmolLM2 itself in 4 bits unless
--draft names another: a guess then costs as much as a token, so it cannot gain. The adapter is random, so its
answers are others.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from benchmarks.engine_alone import run
from build_worker import source
from build_worker.backends import load_builder
from build_worker.backends.base import BuildInput
from build_worker.engine_folder import make_manifest
from build_worker.key import build_key
from cli.sample_model import fetch_sample_model
from infer_worker.backends import backend_class
from mesh.manifest import Manifest
from mesh.model_fields import LoraAdapter, Speculation
from mesh.model_file import ModelFile
from mesh.model_shape import read_shape
from mesh.target import detect_cpu

if TYPE_CHECKING:
    from infer_worker.backends.base import EngineBackend

PLAIN = "plain"
STREAMS = (1, 8)
MAX_TOKENS = 96
LORA_RANK, LORA_ALPHA = 16, 32
WORDS = (
    "river lamp winter harbour baker copper violin garden letter mountain button engine paper falcon silver "
    "kitchen thunder orchard ladder pocket signal velvet anchor candle"
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
COPY = "Repeat this text word for word, and nothing else: {}"
FREE = "Tell me a short story about a {} and a {}."
VERSES = "The {} stood beside the {}, while the {} of the old {} went on. "


class Engine(NamedTuple):
    """A loaded engine."""

    backend: EngineBackend
    manifest: Manifest


def specs(profile: str) -> dict[str, ModelFile]:
    """The four engines' model files, by name."""
    plain = ModelFile(
        model="smollm2", kind="openvino", source="weights", precision="int8", options={"profile": profile}
    )
    lookup = Speculation(method="prompt_lookup")
    draft = Speculation(method="draft_model", source="draft", precision="int4")
    adapter = LoraAdapter(name="random", source="adapter")
    # A draft model takes whole prompts, so shorter sequences keep its steps small.
    return {
        PLAIN: plain,
        "prompt_lookup": plain.model_copy(update={"speculation": lookup}),
        "draft_model": plain.model_copy(update={"speculation": draft, "max_seq_len": 1024}),
        "lora": plain.model_copy(update={"lora": (adapter,)}),
    }


def load(data: Path, spec: ModelFile, sources: dict[str, Path]) -> Engine:
    """Builds an engine, unless it was built before, and loads it."""
    digests = {field: source.digest(path, [], lambda _: None) for field, path in sources.items()}
    builder, target = load_builder(spec.kind), detect_cpu()
    key = build_key(digests.pop("source"), spec, target, builder.tool_versions(), digests)
    home = data / "engines" / key
    if not (home / "manifest.json").exists():
        shutil.rmtree(home, ignore_errors=True)
        work, output = home / "work", home / "engine"
        work.mkdir(parents=True)
        output.mkdir()
        more = {field: path for field, path in sources.items() if field != "source"}
        traits = builder.build(
            BuildInput(spec, sources["source"], target, work, output, more), lambda *_: None
        )
        versions = builder.runtime_versions()
        made = make_manifest(output, spec, target, build_key=key, versions=versions, traits=traits)
        shutil.rmtree(work)
        (home / "manifest.json").write_bytes(made.to_bytes())
    manifest = Manifest.model_validate_json((home / "manifest.json").read_bytes())
    backend = backend_class(manifest.kind)()
    backend.load(home / "engine", manifest)
    backend.warm_up()
    return Engine(backend, manifest)


def write_adapter(folder: Path, weights: Path) -> Path:
    """A random LoRA for the queries and values of every layer, the same each time."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - comes with the extra `local`

    shape = read_shape(weights)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_ALPHA})
    )
    source_of_noise = np.random.default_rng(1)
    tensors = {}
    for layer in range(shape.layers):
        for module, rows in (("q_proj", shape.attention_width), ("v_proj", shape.kv_width)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, size in (("A", (LORA_RANK, shape.hidden)), ("B", (rows, LORA_RANK))):
                noise = source_of_noise.standard_normal(size).astype(np.float32)
                tensors[f"{name}.lora_{part}.weight"] = 0.01 * noise
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_prompts(kind: str, count: int, tokenizer: Tokenizer, noise: random.Random) -> list[list[int]]:
    """Prompts that no earlier round had, so that no cache knows them."""
    words = WORDS.split()
    if kind == "copy":
        asked = [
            COPY.format("".join(VERSES.format(*noise.sample(words, 4)) for _ in range(6)))
            for _ in range(count)
        ]
    else:
        asked = [FREE.format(*noise.sample(words, 2)) for _ in range(count)]
    return [tokenizer.encode(CHAT.format(text)).ids for text in asked]


def measure(engines: dict[str, Engine], tokenizer: Tokenizer, rounds: int) -> list[dict[str, Any]]:
    """Every batch on every engine in turn."""
    noise = random.Random(1)  # noqa: S311 - prompts, no secrets
    results, next_id = [], 1
    for number in range(rounds + 1):
        for kind in ("copy", "free"):
            for streams in STREAMS:
                prompts = make_prompts(kind, streams, tokenizer, noise)
                batch: dict[str, Any] = {"prompts": kind, "streams": streams}
                for name, engine in engines.items():
                    began = time.process_time()
                    batch[name] = run(engine.backend, prompts, MAX_TOKENS, next_id)
                    batch[name]["cpu_s"] = time.process_time() - began
                    next_id += streams
                if number:  # the first warms up
                    results.append(batch)
                print(f"  {kind} {streams}: {_rates(batch, engines)}", file=sys.stderr)  # noqa: T201
    return results


def summarise(engines: dict[str, Engine], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, by engine and then by prompts and streams."""
    summary: dict[str, Any] = {}
    for name, engine in engines.items():
        summary[name] = {}
        guesses = int(engine.manifest.options.get("speculation_tokens", "0"))
        for kind in ("copy", "free"):
            for streams in STREAMS:
                chosen = [r for r in results if (r["prompts"], r["streams"]) == (kind, streams)]
                summary[name][f"{kind}_{streams}"] = _figures(name, chosen, guesses)
    return summary


def _figures(name: str, batches: list[dict[str, Any]], guesses: int) -> dict[str, float]:
    tokens = sum(len(ids) for batch in batches for ids in batch[name]["tokens"])
    rows = sum(batch[name]["rows"] for batch in batches)
    own = [ids for batch in batches for ids in batch[name]["tokens"]]
    plain = [ids for batch in batches for ids in batch[PLAIN]["tokens"]]
    found = {
        "tokens_per_s": statistics.median(_rate(batch[name]) for batch in batches),
        "times_plain": statistics.median(_rate(batch[name]) / _rate(batch[PLAIN]) for batch in batches),
        "cpu_ms_per_token": 1000 * sum(batch[name]["cpu_s"] for batch in batches) / tokens,
        "tokens_per_step": tokens / rows,
        "answers_as_plain": statistics.mean(a == b for a, b in zip(own, plain, strict=True)),
    }
    if guesses:
        found["guesses_accepted"] = (tokens / rows - 1) / guesses
    return {figure: round(value, 3) for figure, value in found.items()}


def _rate(result: dict[str, Any]) -> float:
    rate: float = sum(len(ids) for ids in result["tokens"]) / result["seconds"]
    return rate


def _rates(batch: dict[str, Any], engines: dict[str, Engine]) -> str:
    return ", ".join(f"{name} {_rate(batch[name]):.0f}" for name in engines) + " tokens/s"


def main() -> None:
    """Runs the benchmark; the figures go to standard output as JSON, and with the raw data into a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=["exact", "fast"], default="exact")
    parser.add_argument("--draft", type=Path, help="GGUF file or folder of a draft model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path(".data/bench-speculation"))
    options = parser.parse_args()
    weights = fetch_sample_model(options.data / "sources")
    more = {
        "draft_model": {"speculation.source": options.draft or weights},
        "lora": {"lora[0].source": write_adapter(options.data / "adapter", weights)},
    }
    engines = {
        name: load(options.data, spec, {"source": weights, **more.get(name, {})})
        for name, spec in specs(options.profile).items()
    }
    folder = options.data / "engines" / engines[PLAIN].manifest.build_key / "engine"
    tokenizer = Tokenizer.from_file(str(folder / engines[PLAIN].manifest.tokenizer.file))
    results = measure(engines, tokenizer, options.rounds)
    report = {
        "profile": options.profile,
        "draft": str(options.draft or "SmolLM2-135M itself in int4"),
        **summarise(engines, results),
    }
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    path = Path("bench-results") / f"speculation-{options.profile}-{stamp}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**report, "rounds": results}))
    print(json.dumps({**report, "raw": str(path)}, indent=1))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
