"""TensorRT's timing cache: what its kernels took on a GPU, kept in the store so that builds need not measure.

A cache made elsewhere or by another version is of no use, so each combination has a place of its own. Two
builds at once overwrite each other's: the loser measures a little more the next time.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from build_worker.child_tools import say
from mesh.errors import MeshError, NotFoundError
from mesh.store_layout import timing_cache_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mesh.object_store import ObjectStore
    from mesh.target import Target


class TimingCache:
    """The cache of one GPU and one set of versions; without a store there is nothing, and nothing is kept.

    Args:
        objects: The store.
        target: The GPU.
        versions: Of TensorRT and what else its times depend on.
    """

    def __init__(self, objects: ObjectStore, target: Target, versions: Mapping[str, str]) -> None:
        self._objects = objects
        self.key = timing_cache_key(target.key, versions)

    def take(self, path: Path) -> str:
        """Writes the cache to a file if there is one; returns its digest, "" for none."""
        try:
            self._objects.get_file(self.key, path)
        except NotFoundError:
            return ""
        except MeshError as error:
            say(f"no timing cache, as the store does not give it: {error.message}")
            path.unlink(missing_ok=True)
            return ""
        return _digest(path)

    def give_back(self, path: Path, taken: str) -> None:
        """Stores what a build has left, unless it is what was taken."""
        if not path.exists() or _digest(path) == taken:
            return
        try:
            with path.open("rb") as stream:
                self._objects.put_stream(self.key, stream, path.stat().st_size)
        except MeshError as error:
            say(f"the timing cache is not kept: {error.message}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
