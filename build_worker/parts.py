"""Runs the resumable parts of a build, from the first whose result no earlier attempt has kept."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from build_worker.child_tools import open_scratch, say
from mesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from build_worker.backends.base import BuildInput, Part, Report, ResumableBuilder
    from build_worker.child_messages import ScratchPlace
    from build_worker.scratch import Scratch
    from mesh.settings import BuildWorkerSettings

    OnKept = Callable[[Part], None]


class PartKeeper:
    """Keeps results of parts in the store. What cannot be kept or read is made anew by the next attempt.

    Args:
        scratch: Of the build.
        build_key: Results count only for this key.
        is_retry: Whether anything may be there already.
    """

    def __init__(self, scratch: Scratch, build_key: str, *, is_retry: bool) -> None:
        self._scratch = scratch
        self._build_key = build_key
        self._is_retry = is_retry

    @classmethod
    def at(cls, place: ScratchPlace, build_key: str, settings: BuildWorkerSettings) -> PartKeeper:
        """In the store that the settings name."""
        scratch = open_scratch(place, settings)
        return cls(scratch, build_key, is_retry=place.is_retry)

    def keep(self, part: Part, result: Path) -> None:
        """Stores the result of a part that has just ended."""
        try:
            if not self._scratch.keep(self._name(part), result):
                say(f"the result of {part.name} is too large to be kept for another attempt")
        except MeshError as error:
            say(f"the result of {part.name} is not kept: {error.message}")

    def restore_last(self, parts: Sequence[Part], work: Path) -> tuple[int, Path | None]:
        """Restores the result of the last part that has one kept; returns how many parts are done, and it."""
        if self._is_retry:
            for count in range(len(parts), 0, -1):
                result = self._restore(parts[count - 1], work)
                if result is not None:
                    return count, result
        return 0, None

    def _restore(self, part: Part, work: Path) -> Path | None:
        folder = work / part.name
        try:
            kept = self._scratch.find(self._name(part))
            if kept is None:
                return None
            folder.mkdir()
            self._scratch.restore(self._name(part), kept, folder)
        except MeshError as error:
            say(f"the kept result of {part.name} is not used: {error.message}")
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return folder

    def _name(self, part: Part) -> str:
        return f"{self._build_key}/{part.name}"


def run_parts(
    builder: ResumableBuilder, job: BuildInput, report: Report, keeper: PartKeeper | None, on_kept: OnKept
) -> Path | None:
    """Runs the parts of a build; returns the result of the last, None if there are no parts.

    Args:
        builder: Whose parts.
        job: What is built.
        report: Told how far they are.
        keeper: Keeps results; None: nothing is kept.
        on_kept: Told of each part that an earlier attempt had done.
    """
    parts = builder.parts(job.spec)
    done, previous = keeper.restore_last(parts, job.work) if keeper else (0, None)
    for part in parts[:done]:
        on_kept(part)
    for part in parts[done:]:
        report(part.stage, 0.0)
        result = job.work / part.name
        result.mkdir()
        builder.run_part(part, replace(job, previous=previous), result, report)
        if keeper:
            report(part.stage, 1.0, "keeping the result")
            keeper.keep(part, result)
        if previous is not None:
            shutil.rmtree(previous)  # nothing needs it any more, and it may be as large as the model
        previous = result
    return previous
