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


class FetchTask(_Message):
    """Make the source readable on this host, in `folder` if it must be downloaded; answered by Fetched."""

    task: Literal["fetch"] = "fetch"
    source: str
    folder: Path


class BuildTask(_Message):
    """Make the engine in `output`, with `work` for intermediate files; answered by Built."""

    task: Literal["build"] = "build"
    spec: ModelFile
    source: Path
    target: Target
    build_key: str
    work: Path
    output: Path


class Progress(_Message):
    """How far the work is; any number of these come first."""

    message: Literal["progress"] = "progress"
    stage: Stage
    fraction: float
    detail: str = ""


class Fetched(_Message):
    """Where the source lies, and the digest of its files."""

    message: Literal["fetched"] = "fetched"
    path: Path
    digest: str


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
