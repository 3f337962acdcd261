"""One start of an engine, in a process of its own: `python -m build_worker.backends.vllm_start`.

Arguments: the engine's folder, the folder to start it in, a file of settings, a file for the result. vLLM
gives its memory back only when its process ends, and a second start tells whether what the first one compiled
is found again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mesh import vllm_core
from mesh.errors import BuildError

ERROR_LINES = 12


@dataclass(frozen=True, slots=True)
class StartSettings:
    """What an engine is started by; fields as in mesh.vllm_core.CoreSettings."""

    precision: str
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """How a start went.

    Attributes:
        compilations: Graphs that no cache held.
        kv_blocks: Of the KV cache, as many as the GPU's memory takes.
        seconds: To the end of the first answers, without Python's own start.
    """

    compilations: int
    kv_blocks: int
    seconds: float


def start(folder: Path, work: Path, settings: StartSettings) -> Started:
    """Starts the engine once, lets it answer, and ends it.

    Args:
        folder: The engine.
        work: The folder that it is started in, with its cache.
        settings: Of the engine.

    Raises:
        BuildError: it did not start; holds the end of what it printed.
    """
    asked, result = work / "settings.json", work / "started.json"
    asked.write_text(json.dumps(asdict(settings)))
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "build_worker.backends.vllm_start",
        *map(str, (folder, work, asked, result)),
    ]
    ended = subprocess.run(  # noqa: S603 - built here
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    sys.stderr.write(ended.stdout)  # a build keeps its log
    if ended.returncode or not result.exists():
        end = "\n".join(ended.stdout.splitlines()[-ERROR_LINES:])
        raise BuildError(f"the engine did not start:\n{end}", stage="compile")
    return Started(**json.loads(result.read_text()))


def main() -> None:
    """Entry point."""
    folder, work, asked, result = (Path(text).resolve() for text in sys.argv[1:])
    settings = StartSettings(**json.loads(asked.read_text()))
    began = time.monotonic()
    core = vllm_core.start_core(folder, settings, work)
    vllm_core.try_out(core)
    started = Started(
        compilations=vllm_core.compilations(),
        kv_blocks=core.vllm_config.cache_config.num_gpu_blocks,
        seconds=time.monotonic() - began,
    )
    core.shutdown()
    result.write_text(json.dumps(asdict(started)))


if __name__ == "__main__":
    main()
