"""What is kept of a build between its attempts, in the store, and removed when the build has ended.

    scratch/<build id>/attempt.json                 the latest attempt
    scratch/<build id>/publication.json             the engine that is being published
    scratch/<build id>/<part>.json                  files and facts of a part's result; written last
    scratch/<build id>/<part>/<number>              its files

The part "source" is a source model that came from a hub; those of the kind are "<build key>/<name>", so
that a source that has changed meanwhile finds nothing of what was made from the one before.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mesh.engine_files import sha256_of
from mesh.errors import IntegrityError, NotFoundError
from mesh.manifest import Manifest  # noqa: TC001 - pydantic needs it at run time
from mesh.store_layout import SCRATCH

if TYPE_CHECKING:
    from mesh.object_store import ObjectStore

RECORD_LIMIT_BYTES = 16 << 20

Record = TypeVar("Record", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Attempt(_Record):
    """An attempt that was begun.

    Attributes:
        number: 1 for the first.
        worker: Who began it.
        traceparent: W3C traceparent of its span.
        tracestate: W3C tracestate of its span.
        start_ns: When its span began, in Unix nanoseconds.
        has_ended: Whether its worker lived to end its span.
    """

    number: int
    worker: str
    traceparent: str = ""
    tracestate: str = ""
    start_ns: int = 0
    has_ended: bool = False


class BegunPublication(_Record):
    """An engine whose publication was begun; `sent` are digests of its blobs that were not there before."""

    manifest: Manifest
    sent: tuple[str, ...]


class KeptFile(_Record):
    """One file of a part's result, by its place in the result's folder."""

    path: str
    size: int
    sha256: str


class KeptPart(_Record):
    """A part's result: its files, and what else its maker wants to know of it."""

    files: tuple[KeptFile, ...]
    facts: dict[str, str] = {}


class Scratch:
    """The scratch area of one build. Synchronous, with the errors of ObjectStore.

    Args:
        objects: The store.
        build_id: Whose.
        limit_bytes: A result above this size is not kept.
    """

    def __init__(self, objects: ObjectStore, build_id: str, limit_bytes: int = 0) -> None:
        self._objects = objects
        self._limit_bytes = limit_bytes
        self.build_id = build_id
        self.prefix = f"{SCRATCH}{build_id}/"

    def write_attempt(self, attempt: Attempt) -> None:
        """Notes an attempt, in place of the one before."""
        self._write("attempt", attempt)

    def attempt(self) -> Attempt | None:
        """The latest attempt; None if there was none."""
        return self._read("attempt", Attempt)

    def write_publication(self, publication: BegunPublication) -> None:
        """Notes an engine that will be published, before the first of its blobs is sent."""
        self._write("publication", publication)

    def publication(self) -> BegunPublication | None:
        """The engine whose publication was begun; None if none was."""
        return self._read("publication", BegunPublication)

    def keep(self, part: str, folder: Path, facts: dict[str, str] | None = None) -> bool:
        """Stores the files below a folder as the result of a part; False if they are too large to keep."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if sum(path.stat().st_size for path in paths) > self._limit_bytes:
            return False
        files = [
            self._keep_file(f"{self.prefix}{part}/{number}", path, path.relative_to(folder).as_posix())
            for number, path in enumerate(paths)
        ]
        self._write(part, KeptPart(files=tuple(files), facts=facts or {}))
        return True

    def find(self, part: str) -> KeptPart | None:
        """What is kept of a part; None if nothing is."""
        return self._read(part, KeptPart)

    def restore(self, part: str, kept: KeptPart, folder: Path) -> None:
        """Writes what is kept of a part into an empty folder.

        Raises:
            IntegrityError: a file is not what was kept.
            NotFoundError: a file is gone.
        """
        for number, file in enumerate(kept.files):
            if PurePosixPath(file.path).is_absolute() or ".." in PurePosixPath(file.path).parts:
                raise IntegrityError(f"{file.path!r} leads out of the folder")
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            self._objects.get_file(f"{self.prefix}{part}/{number}", path)
            actual = sha256_of(path)
            if actual != file.sha256:
                raise IntegrityError(
                    f"kept file {file.path!r} has another digest", expected=file.sha256, actual=actual
                )

    def remove(self) -> None:
        """Removes all that is kept of the build."""
        self._objects.abort_uploads(self.prefix)
        for entry in list(self._objects.list(self.prefix)):
            self._objects.delete(entry.key)

    def _keep_file(self, key: str, path: Path, name: str) -> KeptFile:
        size = path.stat().st_size
        with path.open("rb") as stream:
            self._objects.put_stream(key, stream, size)
        return KeptFile(path=name, size=size, sha256=sha256_of(path))

    def _write(self, name: str, record: BaseModel) -> None:
        self._objects.put_bytes(f"{self.prefix}{name}.json", record.model_dump_json().encode())

    def _read(self, name: str, kind: type[Record]) -> Record | None:
        try:
            data = self._objects.get_bytes(f"{self.prefix}{name}.json", RECORD_LIMIT_BYTES)
            return kind.model_validate_json(data)
        except (NotFoundError, ValidationError):  # what an older version wrote counts as nothing
            return None


def builds_with_scratch(objects: ObjectStore) -> list[str]:
    """The ids of the builds of which something is kept."""
    keys = (entry.key.removeprefix(SCRATCH) for entry in objects.list(SCRATCH))
    return sorted({key.partition("/")[0] for key in keys})
