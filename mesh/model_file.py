"""The model file: one YAML file says what to build. Command line and gateway check it by the same rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from pydantic import Field, ValidationError

from enginemesh.v1 import builds_pb2
from mesh import model_rules, model_yaml
from mesh.errors import InvalidFieldError
from mesh.kinds import nearest
from mesh.model_fields import (
    BUILTIN_DATA,
    LORA_LIMIT,
    TARGETS_LIMIT,
    TEXT_LIMIT,
    Calibration,
    KindName,
    Length,
    LoraAdapter,
    Name,
    Options,
    Parallel,
    Place,
    Precision,
    Section,
    ServingSettings,
    Speculation,
    TargetName,
)
from mesh.model_yaml import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic_core import ErrorDetails

__all__ = ["ModelFile", "ModelFileError"]


class ModelFile(Section):
    """What to build. Fields have the meanings of enginemesh.v1.ModelSpec: 0 and "" mean the default."""

    model: Name = Field(description="The name that clients ask for")
    kind: KindName = Field(description="Who runs the engine")
    source: Place = Field(
        "",
        description='Where the weights are: a path on the build worker, "s3://bucket/prefix" or '
        '"hf://owner/name"; a relative path is looked for in the build worker\'s source folders',
    )
    targets: tuple[TargetName, ...] = Field(
        (),
        max_length=TARGETS_LIMIT,
        description="Hardware to build for, an engine for each; none: the build worker's own",
    )
    precision: Precision = Field("", description="Weight precision")
    kv_cache_precision: Precision = Field("", description="Precision of the KV cache")
    calibration: Calibration | None = Field(
        None, description="How the precision is calibrated; only with a precision that is"
    )
    max_batch_size: Length = Field(0, description="Sequences in flight at most")
    max_input_len: Length = Field(0, description="Longest prompt, in tokens")
    max_seq_len: Length = Field(0, description="Longest sequence, prompt and answer together, in tokens")
    max_num_tokens: Length = Field(0, description="Tokens that one engine step may take")
    tensor_parallel: Parallel = Field(0, description="GPUs that share each layer")
    pipeline_parallel: Parallel = Field(0, description="Groups of GPUs that have different layers")
    speculation: Speculation | None = Field(
        None, description="Speculative decoding: how more than one token per step is tried"
    )
    lora: tuple[LoraAdapter, ...] = Field(
        (), max_length=LORA_LIMIT, description="Adapters built into the engine"
    )
    options: Options = Field({}, description="Options of the kind")
    chat_template: str = Field(
        "", max_length=TEXT_LIMIT, description="Jinja chat template in place of the model's own"
    )
    serving: ServingSettings | None = Field(
        None, description="Limits and scale of the model as it is served; may change without a build"
    )

    def to_proto(self) -> builds_pb2.ModelSpec:
        """The same as enginemesh.v1.ModelSpec, which is for one target and so knows no `targets`."""
        return builds_pb2.ModelSpec(**self.model_dump(exclude={"targets"}, exclude_none=True))

    @classmethod
    def from_proto(cls, spec: builds_pb2.ModelSpec) -> ModelFile:
        """The inverse of to_proto.

        Raises:
            InvalidFieldError: names the field at fault, such as "spec.model".
        """
        try:
            made = cls.model_validate(_plain(spec))
        except ValidationError as error:
            field, problem = _first_problem(error)
            raise InvalidFieldError(f"spec.{field}", problem) from error
        made.check()
        return made

    @classmethod
    def load(cls, path: Path) -> ModelFile:
        """Reads a YAML model file.

        Raises:
            ModelFileError: it is not YAML, or breaks a rule.
            OSError: it cannot be read.
        """
        lines, values = model_yaml.read(path)
        try:
            made = cls.model_validate(values)
        except ValidationError as error:
            field, problem = _first_problem(error)
            raise ModelFileError(path, lines.of(field), field, problem) from error
        for field, problem in model_rules.problems(made):
            raise ModelFileError(path, lines.of(field), field, problem)
        return made

    def check(self) -> None:
        """Applies the rules between fields, and those of the kind.

        `load` and `from_proto` have done so; this is for who makes a model file in code.

        Raises:
            InvalidFieldError: names the first field at fault, such as "spec.precision".
        """
        for field, problem in model_rules.problems(self):
            raise InvalidFieldError(f"spec.{field}", problem)

    @property
    def sources(self) -> dict[str, str]:
        """Everything outside the file that its engine is made from: place by dotted field."""
        places = {"source": self.source}
        if self.calibration and self.calibration.data != BUILTIN_DATA:
            places["calibration.data"] = self.calibration.data
        if self.speculation:
            places["speculation.source"] = self.speculation.source
        places |= {f"lora[{at}].source": adapter.source for at, adapter in enumerate(self.lora)}
        return {field: place for field, place in places.items() if place}


def _plain(message: Message) -> dict[str, Any]:
    """A message's fields that are set, with parts as dicts and lists."""
    return {field.name: _plain_value(value) for field, value in message.ListFields()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Message):
        return _plain(value)
    if hasattr(value, "items"):  # a map
        return dict(value)
    if isinstance(value, str | int | float):
        return value
    return [_plain_value(item) for item in value]


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The dotted name of a field at fault, and what is wrong with it, for people.

    A field that there is not comes first: it is often a misspelt one that seems to be missing.
    """
    found = error.errors(include_url=False, include_input=False)
    first = min(found, key=lambda one: one["type"] != "extra_forbidden")
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    return field, _describe(first)


def _describe(problem: ErrorDetails) -> str:
    if problem["type"] == "extra_forbidden":
        known = list(_section(problem["loc"][:-1]).model_fields)
        hint = nearest(str(problem["loc"][-1]), known)
        return f"no such field; {hint}there are {', '.join(known)}"
    if problem["type"] == "missing":
        return "is required"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return problem["msg"][0].lower() + problem["msg"][1:]


def _section(loc: tuple[int | str, ...]) -> type[Section]:
    """The section that a place in the file is of."""
    sections: dict[int | str, type[Section]] = {
        "calibration": Calibration,
        "speculation": Speculation,
        "lora": LoraAdapter,
        "serving": ServingSettings,
    }
    return sections[loc[0]] if loc else ModelFile
