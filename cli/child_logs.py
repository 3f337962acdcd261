"""What child processes print: kept in a file of bounded size each, and shown line by line if wanted."""

from __future__ import annotations

from threading import Thread
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT_BYTES = 16 << 20
"""A log file that has reached this becomes `<name>.log.old`, in place of the one before."""


def pump(name: str, output: IO[bytes], folder: Path, echo: Callable[[str, str], None] | None) -> None:
    """Appends a child's output to `<folder>/<name>.log` until it ends, in a thread of its own.

    Args:
        name: The child's name.
        output: Its standard output and error.
        folder: Made if absent.
        echo: Called with name and each line as well; None: only the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    Thread(target=_pump, args=(name, output, folder / f"{name}.log", echo), daemon=True).start()


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        return file.read().decode(errors="replace").splitlines()[-lines:]


def _pump(name: str, output: IO[bytes], path: Path, echo: Callable[[str, str], None] | None) -> None:
    file = path.open("ab", buffering=0)
    try:
        for line in output:
            file.write(line)
            if echo is not None:
                echo(name, line.decode(errors="replace").rstrip("\n"))
            if file.tell() >= LIMIT_BYTES:
                file.close()
                path.replace(path.with_suffix(".log.old"))
                file = path.open("ab", buffering=0)
    finally:
        file.close()
        output.close()
