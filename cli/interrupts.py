"""Signals that end a command."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Within it, SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that both stop a mesh in order."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_interrupt() -> None:
    """Returns at Ctrl-C or SIGTERM."""
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
