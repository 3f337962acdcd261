"""Lets a child process die with its parent, also when the parent is killed and cannot say goodbye."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Makes the kernel send this process SIGKILL when the thread that started it has gone (Linux).

    Args:
        parent: Process id of the parent, told by itself: it may be gone before this call.
    """
    signal_at_parent_death(parent, signal.SIGKILL)


def signal_at_parent_death(parent: int, number: signal.Signals) -> None:
    """Like die_with_parent, with a signal of the caller's choice."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
