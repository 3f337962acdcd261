"""Classes made of the contract: they take the arguments that it lists, and no others."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from mesh.contract import REQUIRED, Contract

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.contract import Parameter

CONTRACT = Contract.load("tensorrt_llm")


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
            setattr(self, key, given.get(key, parameter.default))

    # As nanobind words it, for those who look at signatures.
    init.__doc__ = f"__init__({_signature(parameters)}) -> None"
    return type(name or entry.rpartition(".")[2], (), {"__init__": init})


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
