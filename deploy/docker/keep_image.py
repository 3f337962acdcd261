"""Makes sure that installing into an image has left alone what its library rests on.

`keep_image.py note FILE` writes what is installed; `keep_image.py compare FILE` fails if a package of KEPT
has another version since, and names others that have, for the log.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

KEPT = (
    *("torch", "torchvision", "triton", "transformers", "tokenizers", "huggingface-hub", "numpy"),
    *("tensorrt-llm", "tensorrt", "nvidia-modelopt", "mpi4py", "xgrammar", "flashinfer-python", "onnx"),
)


def installed() -> dict[str, str]:
    """Version by name, as pip compares names."""
    return {found.name.lower().replace("_", "-"): found.version for found in distributions()}


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """What has another version than before, or is gone: "old -> new" by name."""
    return {
        name: f"{version} -> {after.get(name, 'none')}"
        for name, version in sorted(before.items())
        if after.get(name) != version
    }


def main(command: str, file: Path) -> int:
    """Does what the module says; returns the exit status."""
    if command == "note":
        file.write_text(json.dumps(installed()))
        return 0
    found = changes(json.loads(file.read_text()), installed())
    for name, change in found.items():
        print(f"{'CHANGED' if name in KEPT else 'changed'} {name} {change}")  # noqa: T201 - the image's log
    return 1 if found.keys() & set(KEPT) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
