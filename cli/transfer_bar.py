"""A bar for bytes that are on their way."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def transfer_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Shows on a terminal how many of `total` bytes are done, as told by calling what this gives."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)
