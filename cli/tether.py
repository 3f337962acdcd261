"""Ties a child process to the one that starts it: the child gets SIGTERM when its parent is gone.

A killed supervisor cannot stop its children, and two Valkeys on one folder would spoil it. Linux only
(prctl); elsewhere the command runs untied.
"""

from __future__ import annotations

import os
import signal
import sys

from mesh.parent_death import signal_at_parent_death


def tethered(command: list[str]) -> list[str]:
    """The command line that runs `command` tied to this process.

    The kernel ties it to the thread that starts it, so that thread must live as long as the child.
    """
    # A program of its own rather than a preexec_fn, which may deadlock in a process with threads.
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Ties this process to the parent whose id comes first, then becomes the command that follows."""
    signal_at_parent_death(int(arguments[0]), signal.SIGTERM)
    command = arguments[1:]
    os.execvp(command[0], command)  # noqa: S606 -- the caller's own command, and no shell wanted


if __name__ == "__main__":
    main(sys.argv[1:])
