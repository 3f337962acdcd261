"""The first stage of a build: makes every source readable on this host and reads all of it for its digest."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from build_worker import source
from build_worker.child_messages import Fetched
from build_worker.child_tools import open_scratch, say
from build_worker.stages import Stage
from mesh.errors import InvalidFieldError, MeshError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from build_worker.backends.base import Report
    from build_worker.child_messages import FetchTask, ScratchPlace
    from mesh.settings import BuildWorkerSettings

MODEL = "source"
"""Field of the model itself."""

DOWNLOAD_SHARE = 0.8
"""Of a source's time, as long as it is downloaded; the rest is reading."""

KEPT_SCHEME = "hf://"
"""What comes from a hub is kept for the next attempt: there it may have changed by then, and is far away."""

PATH_FACT = "path"


def fetch(task: FetchTask, settings: BuildWorkerSettings, report: Report) -> Fetched:
    """Fetches all sources of a build.

    Raises:
        MeshError: as source.fetch and source.digest do; names the field at fault.
    """
    sources = {MODEL: task.source, **task.more_sources}
    paths: dict[str, Path] = {}
    digests: dict[str, str] = {}
    for number, (field, place) in enumerate(sources.items()):
        folder = task.folder / str(number)
        folder.mkdir()
        one = _Fetch(place, folder, f"source/{number}", task.scratch, settings)

        def tell(fraction: float, detail: str, number: int = number) -> None:
            report(Stage.FETCH, (number + fraction) / len(sources), detail)

        try:
            paths[field], digests[field] = one.run(tell)
        except InvalidFieldError as error:
            raise InvalidFieldError(f"spec.{field}", error.description) from error
    return Fetched(path=paths.pop(MODEL), digest=digests.pop(MODEL), more_paths=paths, more_digests=digests)


@dataclass(frozen=True)
class _Fetch:
    place: str
    folder: Path
    name: str
    scratch: ScratchPlace | None
    settings: BuildWorkerSettings

    def run(self, tell: Callable[[float, str], None]) -> tuple[Path, str]:
        """The source's file or folder, and its digest."""
        tell(0.0, self.place)
        path = self._restored() or self._fetched(tell)
        digest = source.digest(
            path,
            self.settings.source_root_list,
            lambda fraction: tell(DOWNLOAD_SHARE + (1 - DOWNLOAD_SHARE) * fraction, "reading weights"),
        )
        return path, digest

    def _fetched(self, tell: Callable[[float, str], None]) -> Path:
        path = source.fetch(
            self.place,
            self.settings,
            self.folder,
            lambda fraction: tell(DOWNLOAD_SHARE * fraction, "downloading"),
        )
        if self.scratch is not None and self.place.startswith(KEPT_SCHEME):
            tell(DOWNLOAD_SHARE, "keeping the download")
            try:
                facts = {PATH_FACT: path.relative_to(self.folder).as_posix()}
                open_scratch(self.scratch, self.settings).keep(self.name, self.folder, facts)
            except MeshError as error:
                say(f"the download is not kept: {error.message}")
        return path

    def _restored(self) -> Path | None:
        if self.scratch is None or not self.scratch.is_retry or not self.place.startswith(KEPT_SCHEME):
            return None
        try:
            scratch = open_scratch(self.scratch, self.settings)
            kept = scratch.find(self.name)
            if kept is None:
                return None
            scratch.restore(self.name, kept, self.folder)
        except MeshError as error:
            say(f"the kept download is not used: {error.message}")
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            return None
        say(f"{self.place} was downloaded by an earlier attempt")
        return self.folder / kept.facts[PATH_FACT]
