"""Reads a model file's YAML and keeps the line of each of its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from typing_extensions import override

from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_LIMIT_BYTES = 1 << 20


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


class Lines:
    """Where each field of a file stands, by its dotted name, such as "lora[1].source".

    Args:
        path: The file, for errors.
        root: Its outermost mapping.

    Raises:
        ModelFileError: a field stands there twice.
    """

    def __init__(self, path: Path, root: yaml.MappingNode) -> None:
        self._path = path
        self._lines: dict[str, int] = {}
        self._visited = {id(root)}  # aliases may make a node its own part, or a part of very many
        self._collect("", root)

    def of(self, field: str) -> int:
        """The line of a field; of what it would be a part of, if it is not there."""
        while field:
            if field in self._lines:
                return self._lines[field]
            field = field[: max(field.rfind("."), field.rfind("["), 0)]
        return 1

    def _collect(self, name: str, node: yaml.Node) -> None:
        for part, begin, child in _parts(name, node):
            line = begin.start_mark.line + 1
            if part in self._lines:
                problem = f"stands here a second time, first in line {self._lines[part]}"
                raise ModelFileError(self._path, line, part, problem)
            self._lines[part] = line
            if id(child) not in self._visited:
                self._visited.add(id(child))
                self._collect(part, child)


def _parts(name: str, node: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Name, first node and value of everything directly inside a node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (f"{name}.{key.value}" if name else str(key.value)), key, value
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield f"{name}[{place}]", item, item


def read(path: Path) -> tuple[Lines, dict[str, Any]]:
    """A file's fields and their lines.

    Raises:
        ModelFileError: it is too large, no YAML, no mapping, or nested too deeply.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        data = stream.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise ModelFileError(path, 1, "", f"a model file has at most {FILE_LIMIT_BYTES} bytes")
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
        values = yaml.safe_load(data)
        if not isinstance(root, yaml.MappingNode):
            raise ModelFileError(path, 1, "", "must hold fields such as `model: my-model`")
        return Lines(path, root), values
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ModelFileError(path, line, "", f"not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ModelFileError(path, 1, "", "not YAML in UTF-8") from error
    except RecursionError:
        raise ModelFileError(path, 1, "", "is nested too deeply") from None
