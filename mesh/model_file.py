"""The model file: one YAML file says what to build. Command line and gateway check it by the same rules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import override

from enginemesh.v1 import builds_pb2
from mesh.errors import InvalidFieldError
from mesh.manifest import MODEL_NAME

if TYPE_CHECKING:
    from pathlib import Path

FILE_LIMIT_BYTES = 1 << 20
TEXT_LIMIT = 256 << 10
LENGTH_LIMIT = 1 << 24
OPTIONS_LIMIT = 64

_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_PRECISION = re.compile(r"[a-z0-9_]{0,31}")
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ModelFileError(InvalidFieldError):
    """A model file is wrong; says in which file, line and field."""

    def __init__(self, path: Path, line: int, field: str, problem: str) -> None:
        super().__init__(field, problem, file=path, line=line)
        self.path = path
        self.line = line
        self.message = f"{path}:{line}: {field}: {problem}" if field else f"{path}:{line}: {problem}"

    @override
    def __str__(self) -> str:
        return self.message


def _matching(pattern: re.Pattern[str], allowed: str) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"must be {allowed}, not {value!r}"[:300])
        return value

    return BeforeValidator(check)


def _plain_text(value: object) -> object:
    """YAML reads `true` and `5` as other types than text; options are text everywhere."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return value


def _options(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > OPTIONS_LIMIT:
            raise ValueError(f"at most {OPTIONS_LIMIT}, not {len(value)}")
        for name in value:
            if not isinstance(name, str) or not _OPTION.fullmatch(name):
                raise ValueError(f"option names are of a-z, 0-9 and '_', not {name!r}"[:300])
    return value


Length = Annotated[int, Field(ge=0, le=LENGTH_LIMIT, strict=True)]


class ModelFile(BaseModel):
    """What to build. Fields have the meanings of enginemesh.v1.ModelSpec: 0 and "" mean the default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, _matching(MODEL_NAME, "1 to 63 characters of a-z, 0-9, '.' and '-'")]
    kind: Annotated[str, _matching(_KIND, "an engine kind, such as openvino")]
    source: str = Field("", max_length=1024)
    precision: Annotated[str, _matching(_PRECISION, "a weight precision, such as int8")] = ""
    max_batch_size: Length = 0
    max_seq_len: Length = 0
    max_num_tokens: Length = 0
    chat_template: str = Field("", max_length=TEXT_LIMIT)
    options: Annotated[
        dict[str, Annotated[str, BeforeValidator(_plain_text), Field(max_length=TEXT_LIMIT)]],
        BeforeValidator(_options),
    ] = {}

    def to_proto(self) -> builds_pb2.ModelSpec:
        """The same as enginemesh.v1.ModelSpec."""
        return builds_pb2.ModelSpec(**self.model_dump())

    @classmethod
    def from_proto(cls, spec: builds_pb2.ModelSpec) -> ModelFile:
        """The inverse of to_proto.

        Raises:
            InvalidFieldError: names the field at fault, such as "spec.model".
        """
        values: dict[str, Any] = {name: getattr(spec, name) for name in cls.model_fields}
        values["options"] = dict(spec.options)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            field, problem = _first_problem(error)
            raise InvalidFieldError(f"spec.{field}", problem) from error

    @classmethod
    def load(cls, path: Path) -> ModelFile:
        """Reads a YAML model file.

        Raises:
            ModelFileError: it is not YAML, or breaks a rule.
            OSError: it cannot be read.
        """
        with path.open("rb") as stream:
            data = stream.read(FILE_LIMIT_BYTES + 1)
        if len(data) > FILE_LIMIT_BYTES:
            raise ModelFileError(path, 1, "", f"a model file has at most {FILE_LIMIT_BYTES} bytes")
        lines, values = _parse(path, data)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            field, problem = _first_problem(error)
            raise ModelFileError(path, lines.get(field, 1), field, problem) from error


def _parse(path: Path, data: bytes) -> tuple[dict[str, int], dict[str, Any]]:
    """The file's values, and the line of each field by its dotted name."""
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
        values = yaml.safe_load(data)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ModelFileError(path, line, "", f"not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ModelFileError(path, 1, "", "not YAML in UTF-8") from error
    if not isinstance(root, yaml.MappingNode):
        raise ModelFileError(path, 1, "", "must hold fields such as `model: my-model`")
    lines: dict[str, int] = {}
    _collect_lines(path, root, "", lines)
    return lines, values


def _collect_lines(path: Path, mapping: yaml.MappingNode, prefix: str, lines: dict[str, int]) -> None:
    for key, value in mapping.value:
        name = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if name in lines:
            raise ModelFileError(path, line, name, f"stands here a second time, first in line {lines[name]}")
        lines[name] = line
        if isinstance(value, yaml.MappingNode) and not prefix:  # deeper ones are refused by the model
            _collect_lines(path, value, f"{name}.", lines)


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The dotted name of the first field at fault, and what is wrong with it, for people."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(ModelFile.model_fields)
        return field, f"no such field; there are {known}"
    if first["type"] == "missing":
        return field, "is required"
    if first["type"] == "value_error":
        return field, str(first["ctx"]["error"])
    return field, first["msg"][0].lower() + first["msg"][1:]
