"""Drives an engine without the mesh: `python -m benchmarks.engine_alone FOLDER MANIFEST`.

Reads one JSON object per line ({"prompts": [[id, ...], ...], "max_tokens": n}) and answers with one
({"seconds": s, "first_token_s": [...], "tokens": [[id, ...], ...], "rows": n}): all prompts start together,
and the loop does nothing but step. A row is what one step gave to one sequence.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginemesh.internal.v1 import engine_process_pb2
from enginemesh.v1 import sampling_pb2
from infer_worker.backends import backend_class
from mesh.manifest import Manifest

if TYPE_CHECKING:
    from infer_worker.backends.base import EngineBackend


def run(engine: EngineBackend, prompts: list[list[int]], max_tokens: int, first_id: int) -> dict[str, Any]:
    """Runs the prompts together, greedily, to `max_tokens` each."""
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    for place, prompt in enumerate(prompts):
        engine.add(engine_process_pb2.AddSequence(id=first_id + place, prompt_ids=prompt, sampling=sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    first_token_s = [0.0] * len(prompts)
    unfinished, rows = len(prompts), 0
    while unfinished:
        step = engine.step()
        now = time.perf_counter() - began
        fresh, start = list(step.token_ids), 0
        for identifier, count in zip(step.ids, step.counts, strict=True):
            place = identifier - first_id
            if not tokens[place] and count:
                first_token_s[place] = now
            tokens[place] += fresh[start : start + count]
            start += count
        rows += len(step.ids)
        unfinished -= len(step.finishes)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "first_token_s": first_token_s, "tokens": tokens, "rows": rows}


def main() -> None:
    """Loads the engine, then answers line by line until the end of input."""
    folder, manifest = Path(sys.argv[1]), Manifest.model_validate_json(Path(sys.argv[2]).read_bytes())
    engine = backend_class(manifest.kind)()
    engine.load(folder, manifest)
    engine.warm_up()
    next_id = 1
    print("{}", flush=True)  # noqa: T201 - the answer protocol: ready
    for line in sys.stdin:
        job = json.loads(line)
        result = run(engine, job["prompts"], job["max_tokens"], next_id)
        next_id += len(job["prompts"])
        print(json.dumps(result), flush=True)  # noqa: T201 - the answer protocol


if __name__ == "__main__":
    main()
