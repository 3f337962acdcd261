"""Lets a child process die with its parent, also when the parent is killed and cannot say goodbye."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def guard_group(close: Iterable[int] = ()) -> None:
    """Starts a process that kills this process group as soon as this process has gone, however it went.

    What this process starts may have processes of its own, which the kernel does not tie to its parent.

    Args:
        close: File descriptors that the guard must not hold open.
    """
    own_id = os.getpid()
    if os.fork() != 0:
        return
    for descriptor in close:
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal_at_parent_death(own_id, signal.SIGUSR1)
    signal.sigwait({signal.SIGUSR1})
    os.killpg(0, signal.SIGKILL)
