"""What every engine kind implements to be built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from build_worker.stages import Stage
    from mesh.manifest import TokenizerInfo
    from mesh.model_file import ModelFile
    from mesh.target import Target


class Report(Protocol):
    """Told how far a build is."""

    def __call__(self, stage: Stage, fraction: float, detail: str = "") -> None:
        """`fraction` of `stage` is done, 0 to 1; `detail` is for people."""


@dataclass(frozen=True, slots=True)
class BuildInput:
    """What a builder works from.

    Attributes:
        source: File or folder of the source model; an empty folder if the spec names no source.
        target: The hardware that this process runs on.
        work: An empty folder for intermediate files; removed afterwards.
        output: An empty folder that becomes the engine.
        more_sources: What the spec names besides (ModelFile.sources), by dotted field: "speculation.source",
            "lora[0].source", "calibration.data".
        previous: The result of the last resumable part; None if the kind has no parts, or for its first.
    """

    spec: ModelFile
    source: Path
    target: Target
    work: Path
    output: Path
    more_sources: Mapping[str, Path] = field(default_factory=dict)
    previous: Path | None = None


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What the manifest says of an engine besides its files; fields as in mesh.manifest.Manifest."""

    precision: str
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    tokenizer: TokenizerInfo
    kv_bytes_per_token: int = 0
    capabilities: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)


class Builder(Protocol):
    """Makes engines of one kind. The same input must give the same bytes each time."""

    def validate(self, spec: ModelFile) -> None:
        """Refuses, before anything is fetched, what this kind cannot do.

        Raises:
            InvalidFieldError: names the field, such as "spec.precision".
            PreconditionError: what the spec needs is not installed here.
        """

    def runtime_versions(self) -> dict[str, str]:
        """Versions that the one who runs the engine must have too; they go into the manifest."""

    def tool_versions(self) -> dict[str, str]:
        """Versions of everything that the engine's bytes depend on; they go into the build key."""

    def build(self, job: BuildInput, report: Report) -> EngineTraits:
        """Fills `job.output`. Runs in a process of its own, which may be killed at any time.

        Raises:
            MeshError: the source or the spec is at fault, and how.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """One resumable part of a build.

    Attributes:
        name: Names its result among those of the kind: a-z and "_".
        stage: What the part counts as, for progress and traces.
    """

    name: str
    stage: Stage


@runtime_checkable
class ResumableBuilder(Builder, Protocol):
    """A builder whose work is a chain of parts, each a function of the source and the result before it.

    The result of a part that ended is kept in the store until the build has ended, so that a build whose
    worker died goes on from there. After the last part `build` is called, with its result as `job.previous`.

    So `tensorrt_llm` has quantise (source to checkpoint), compile (checkpoint to engine files) and
    collect (engine files and tokenizer to what is published) as parts, and a `build` that moves what collect
    left into `job.output` and reads the traits from it.
    """

    def parts(self, spec: ModelFile) -> Sequence[Part]:
        """The parts of this build in their order; also none, for a spec that is built in one go."""

    def run_part(self, part: Part, job: BuildInput, result: Path, report: Report) -> None:
        """Fills `result`, an empty folder, from `job.source` and `job.previous`.

        Nothing else may pass from part to part: they may run in different processes on different hosts.

        Raises:
            MeshError: as `build` does.
        """
