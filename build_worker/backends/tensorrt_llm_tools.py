"""The two programs that make a TensorRT-LLM engine, as child processes: their output becomes progress."""

from __future__ import annotations

import json
import re
import resource
import subprocess
from collections import deque
from typing import TYPE_CHECKING

from build_worker.child_tools import say
from mesh.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LAST_LINES = 40
_KIB_PER_MIB = 1024
_PROGRESS = re.compile(r"progress ([0-9.]+) (.*)")
_REFUSED = "refused: "
_ERROR = re.compile(r"\[E\]|\bError\b|\berror:|Exception|CUDA out of memory|OutOfMemory")
_VERSIONS = """
import importlib.metadata as m, json
def of(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return "none"
print(json.dumps({name: of(name) for name in ("nvidia-modelopt", "torch", "transformers")}))
"""

# What the tools say on the way, in order, and how much of one rank's work is done by then; compiling takes
# nearly all of it.
_MARKS = (
    (re.compile(r"Compute capability"), 0.02, "reading the checkpoint"),
    (re.compile(r"(?i)build(ing)? TensorRT engine"), 0.1, "choosing kernels"),
    (re.compile(r"Detected \d+ inputs and \d+ output"), 0.2, "choosing kernels"),
    (re.compile(r"Engine generation completed"), 0.9, "kernels chosen"),
    (re.compile(r"Total time of building"), 0.92, "engine built"),
    (re.compile(r"Serializing engine to"), 0.95, "writing the engine"),
)
_RANK_ENDED = re.compile(r"Engine serialized")
_ALL_ENDED = re.compile(r"Total time of building all engines")


class BuildOutput:
    """How far trtllm-build is, by what it has said so far.

    Args:
        ranks: Engines that it makes. With several at once their lines are mixed: the furthest one counts.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ended = 0
        self._mark = 0.0
        self.detail = "starting"

    def read(self, line: str) -> float | None:
        """The fraction that is done if the line tells it, else None; it never becomes less."""
        if _ALL_ENDED.search(line):
            self._ended, self._mark, self.detail = self._ranks, 0.0, "all engines built"
            return 1.0
        if _RANK_ENDED.search(line) and self._ended < self._ranks:
            self._ended += 1
            self._mark, self.detail = 0.0, f"engine {self._ended} of {self._ranks} written"
            return self._ended / self._ranks
        for pattern, done, detail in _MARKS:
            if pattern.search(line) and done > self._mark and self._ended < self._ranks:
                self._mark, self.detail = done, detail
                return (self._ended + self._mark) / self._ranks
        return None


def run_build(
    words: Sequence[str], work: Path, ranks: int, on_progress: Callable[[float, str], None]
) -> None:
    """Runs trtllm-build in the folder `work`; the memory it took at most goes into the log.

    Raises:
        BuildError: it failed; says with which words.
    """
    output = BuildOutput(ranks)

    def read(line: str) -> None:
        fraction = output.read(line)
        if fraction is not None:
            on_progress(fraction, output.detail)

    _run("trtllm-build", words, work, read)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // _KIB_PER_MIB
    say(f"trtllm-build took {peak} MiB of host memory at most")


def run_quantiser(
    python: str, task: dict[str, object], work: Path, on_progress: Callable[[float, str], None]
) -> None:
    """Runs build_worker/modelopt/quantise.py in the environment of this Python.

    Raises:
        BuildError: it failed, or refused the task; says why.
    """
    import build_worker.modelopt

    script = f"{build_worker.modelopt.__path__[0]}/quantise.py"
    file = work / "quantise.json"
    file.write_text(json.dumps(task))

    def read(line: str) -> None:
        if match := _PROGRESS.fullmatch(line):
            on_progress(float(match[1]), match[2])

    _run("the quantiser", [python, script, str(file)], work, read)


def tool_versions(python: str) -> dict[str, str]:
    """Versions of what quantises, in the environment of this Python."""
    found = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)  # noqa: S603 - the operator's own
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def _run(name: str, words: Sequence[str], work: Path, read: Callable[[str], None]) -> None:
    """Runs a program in this process's group, so that limits count it and its end is ours."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(  # noqa: S603 - the operator's own
        list(words), cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None  # noqa: S101 - asked for
        for line in process.stdout:
            text = line.rstrip()
            say(text)
            last.append(text)
            read(text)
    if process.returncode != 0:
        raise BuildError(f"{name} failed: {_reason(last, process.returncode)}")


def _reason(lines: Sequence[str], status: int) -> str:
    """What a program that failed said of it: a refusal, else the last error, else its last line."""
    for line in reversed(lines):
        if line.startswith(_REFUSED):
            return line.removeprefix(_REFUSED)
    errors = [line for line in lines if _ERROR.search(line)] or list(lines)
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"{errors[-1]} ({how})" if errors else how
