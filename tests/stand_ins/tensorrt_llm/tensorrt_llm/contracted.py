"""Classes made of the contract: they take the arguments that it lists, and no others."""

from __future__ import annotations

import copy
import enum
import re
from typing import TYPE_CHECKING, Any

from mesh.contract import REQUIRED, Contract

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.contract import Parameter

CONTRACT = Contract.load("tensorrt_llm")
_DEFAULT_OBJECT = re.compile(r"<(\w+)\(\)>")
_made: dict[str, type] = {}


def contracted(entry: str, name: str = "", *, error: type[Exception] = TypeError, takes_any: bool = False):
    """A class with the arguments of a contract's entry, as attributes.

    Args:
        entry: In the contract.
        name: Of the class; else that of the entry.
        error: What wrong arguments raise: TypeError as bindings do, ValueError as pydantic.
        takes_any: Unknown names are ignored, as PluginConfig does.
    """
    parameters = CONTRACT.parameters(entry)

    def init(self, *values: object, **named: object) -> None:
        given = by_name(entry, parameters, values, named)
        if takes_any:
            given = {key: value for key, value in given.items() if key in parameters}
        problems = CONTRACT.problems(entry, given)
        if problems:
            raise error("; ".join(problems))
        for key, parameter in parameters.items():
            setattr(self, key, given[key] if key in given else _default(parameter, entry))

    # As nanobind words it, for those who look at signatures.
    init.__doc__ = f"__init__({_signature(parameters)}) -> None"
    _made[entry] = type(name or entry.rpartition(".")[2], (), {"__init__": init})
    return _made[entry]


def _default(parameter: Parameter, entry: str) -> object:
    """A parameter's default; a new object where that is one of a class made here."""
    match = _DEFAULT_OBJECT.fullmatch(str(parameter.default))
    if match is None:
        return copy.copy(parameter.default)
    # Bindings have classes of the same name as the models of arguments.
    is_binding = CONTRACT.classes[entry]["module"].endswith("bindings.executor")
    names = [f"executor.{match[1]}"] if is_binding else []
    found = next((_made[known] for known in (*names, match[1]) if known in _made), None)
    return found() if found else parameter.default


def classes_of(module: str, **how) -> dict[str, type]:
    """The classes and enums that the contract has in a module; `how` is as of `contracted`."""
    return {
        name.rpartition(".")[2]: enumeration(name) if "Enum" in entry["kind"] else contracted(name, **how)
        for name, entry in CONTRACT.classes.items()
        if entry["module"] == module
    }


def by_name(
    entry: str, parameters: Mapping[str, Parameter], values: tuple[object, ...], named: dict[str, object]
) -> dict[str, Any]:
    """Arguments of a call by name.

    Raises:
        TypeError: too many are given by position.
    """
    positional = [key for key, parameter in parameters.items() if parameter.is_positional]
    if len(values) > len(positional):
        raise TypeError(f"{entry}: {len(values)} positional arguments, takes {len(positional)}")
    return {**dict(zip(positional, values, strict=False)), **named}


def enumeration(entry: str) -> type[enum.Enum]:
    """An enum with the members of a contract's entry."""
    return enum.Enum(entry, CONTRACT.classes[entry]["attributes"])


def _signature(parameters: Mapping[str, Parameter]) -> str:
    parts = ["self"]
    was_positional = True
    for key, parameter in parameters.items():
        if was_positional and not parameter.is_positional:
            parts.append("*")
            was_positional = False
        default = "" if parameter.default == REQUIRED else f" = {parameter.default!r}"
        parts.append(f"{key}: {parameter.type}{default}")
    return ", ".join(parts)
