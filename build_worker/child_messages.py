"""What crosses the pipes between a build worker and the process that does the work: lines of JSON."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic needs these at run time
from typing import Annotated, Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, TypeAdapter

from build_worker.stages import Stage  # noqa: TC001
from mesh.manifest import Manifest  # noqa: TC001
from mesh.model_file import ModelFile  # noqa: TC001
from mesh.target import Target  # noqa: TC001

LINE_LIMIT_BYTES = 16 << 20


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ScratchPlace(_Message):
    """Where results are kept for the next attempt of a build; `is_retry` if there was one before."""

    build_id: str
    limit_bytes: int
    is_retry: bool = False


class FetchTask(_Message):
    """Make the sources readable on this host, in `folder` if they must be downloaded; answered by Fetched.

    `more_sources` are those beside the model itself, by their dotted fields.
    """

    task: Literal["fetch"] = "fetch"
    source: str
    folder: Path
    more_sources: dict[str, str] = {}
    scratch: ScratchPlace | None = None


class BuildTask(_Message):
    """Make the engine in `output`, with `work` for intermediate files; answered by Built."""

    task: Literal["build"] = "build"
    spec: ModelFile
    source: Path
    target: Target
    build_key: str
    work: Path
    output: Path
    more_sources: dict[str, Path] = {}
    scratch: ScratchPlace | None = None


class Progress(_Message):
    """How far the work is; any number of these come first. `is_kept` if an earlier attempt did the stage."""

    message: Literal["progress"] = "progress"
    stage: Stage
    fraction: float
    detail: str = ""
    is_kept: bool = False


class Fetched(_Message):
    """Where the sources lie, and the digests of their files."""

    message: Literal["fetched"] = "fetched"
    path: Path
    digest: str
    more_paths: dict[str, Path] = {}
    more_digests: dict[str, str] = {}


class Built(_Message):
    """The engine's manifest."""

    message: Literal["built"] = "built"
    manifest: Manifest


class Failed(_Message):
    """The work failed; a serialised google.rpc.Status says how."""

    message: Literal["failed"] = "failed"
    status: Base64Bytes


Task = TypeAdapter[FetchTask | BuildTask](Annotated[FetchTask | BuildTask, Field(discriminator="task")])
Message = TypeAdapter[Progress | Fetched | Built | Failed](
    Annotated[Progress | Fetched | Built | Failed, Field(discriminator="message")]
)
