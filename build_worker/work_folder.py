"""Folders for half-made engines; none outlives its build, not even that of a worker that was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def work_folder(root: Path) -> Iterator[Path]:
    """A new folder in `root`, removed at the end; a lock shows to others that its owner lives."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = Path(tempfile.mkdtemp(dir=root))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            break
        os.close(lock)  # another worker took it for abandoned before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(root: Path) -> int:
    """Removes the folders in `root` whose owners have died; returns how many."""
    removed = 0
    for folder in root.iterdir() if root.exists() else ():
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # its owner was done with it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
        finally:
            os.close(lock)
    return removed
