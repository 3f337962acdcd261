"""Limits of a build: memory, disk, time. What is above one ends the build."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from mesh.errors import BuildLimitError

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.settings import BuildWorkerSettings

MEMORY_INTERVAL_S = 0.2
DISK_INTERVAL_S = 1.0
BLOCK_BYTES = 512
"""Of st_blocks, whatever the file system."""


@dataclass(frozen=True)
class Excess:
    """A limit that a build has broken."""

    limit: str
    setting: str
    allowed: str
    used: str

    def to_error(self, stage: str) -> BuildLimitError:
        """What the build ends with."""
        return BuildLimitError(
            f"{self.limit} limit: the build took {self.used} in stage {stage}; the build worker allows "
            f"{self.allowed} ({self.setting})",
            limit=self.limit,
            setting=self.setting,
            allowed=self.allowed,
            used=self.used,
            stage=stage,
        )


class LimitWatch:
    """Watches what one build takes on this host. Time counts from its making.

    Args:
        settings: The limits; 0 is none.
        folder: Where all files of the build are.
    """

    def __init__(self, settings: BuildWorkerSettings, folder: Path) -> None:
        self._memory_limit = settings.build_memory_limit_bytes
        self._disk_limit = settings.build_disk_limit_bytes
        self._time_limit_s = settings.build_time_limit_s
        self._folder = folder
        self._begin = time.monotonic()
        self._disk_due = 0.0

    async def until_exceeded(self, group: int) -> Excess:
        """Returns once a limit is broken.

        Args:
            group: Id of the group of the build's processes.
        """
        while True:
            excess = await asyncio.to_thread(self._look, group)
            if excess is not None:
                return excess
            await asyncio.sleep(MEMORY_INTERVAL_S)

    def leave_out(self, seconds: float) -> None:
        """Time that the build only waited does not count."""
        self._begin += seconds

    def time_excess(self) -> Excess | None:
        """The time limit, if it is broken."""
        used = time.monotonic() - self._begin
        if not self._time_limit_s or used <= self._time_limit_s:
            return None
        return Excess("time", "ENGINEMESH_BUILD_TIME_LIMIT_S", f"{self._time_limit_s:g} s", f"{used:.1f} s")

    def _look(self, group: int) -> Excess | None:
        return self.time_excess() or self._memory_excess(group) or self._disk_excess()

    def _memory_excess(self, group: int) -> Excess | None:
        used = memory_of_group(group) if self._memory_limit else 0
        if used <= self._memory_limit:
            return None
        setting = "ENGINEMESH_BUILD_MEMORY_LIMIT_BYTES"
        return Excess("memory", setting, f"{self._memory_limit} bytes", f"{used} bytes")

    def _disk_excess(self) -> Excess | None:
        now = time.monotonic()
        if not self._disk_limit or now < self._disk_due:
            return None
        self._disk_due = now + DISK_INTERVAL_S
        used = disk_usage(self._folder)
        if used <= self._disk_limit:
            return None
        setting = "ENGINEMESH_BUILD_DISK_LIMIT_BYTES"
        return Excess("disk", setting, f"{self._disk_limit} bytes", f"{used} bytes")


def memory_of_group(group: int) -> int:
    """Bytes of memory that the processes of a group have for themselves.

    What they share does not count: mapped files above all, which the kernel drops when memory is short.
    """
    return sum(_private_memory(pid) for pid in psutil.pids() if _group_of(pid) == group)


def disk_usage(folder: Path) -> int:
    """Bytes that the files below a folder take on disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * BLOCK_BYTES  # noqa: PTH118 - a Path for each of many files is slow
            except FileNotFoundError:  # removed meanwhile
                continue
    return total


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _private_memory(pid: int) -> int:
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:  # ended meanwhile
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))
