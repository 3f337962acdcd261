"""What the parts of a build's own process share: its log, and where results are kept."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_worker.child_messages import ScratchPlace
    from build_worker.scratch import Scratch
    from mesh.settings import BuildWorkerSettings


def say(text: str) -> None:
    """Adds a line to the build's log, which is what this process writes to its outputs."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - see above


def open_scratch(place: ScratchPlace, settings: BuildWorkerSettings) -> Scratch:
    """The scratch area of a build, in the store that the settings name."""
    # The store's client takes half of this process's time to start, and not every task needs it.
    from build_worker.scratch import Scratch  # noqa: PLC0415
    from mesh.object_store import ObjectStore  # noqa: PLC0415

    return Scratch(ObjectStore.from_settings(settings), place.build_id, place.limit_bytes)
