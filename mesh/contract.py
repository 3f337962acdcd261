"""What the mesh holds a library's interface for, where the library itself cannot be installed everywhere.

A contract (mesh/contracts/) lists classes with their arguments, types and defaults, command-line flags and
fields of statistics, as they were read in the library's public sources. Arguments are checked against it
before they are given, tests hold a stand-in of the library against it, and `enginemesh doctor --kind` the
library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).parent / "contracts"
REQUIRED = "<required>"
_SCALARS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
_FLAG_NAME = re.compile(r"^(?:--)?([a-z_]+)")
_SWITCH_WORDS = ("enable", "disable")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: its name, its type as the library writes it, its default as JSON shows it."""

    name: str
    type: str
    default: Any
    is_positional: bool

    @property
    def is_required(self) -> bool:
        """Whether a call must give it."""
        return self.default == REQUIRED and self.name != "kwargs"

    def problem(self, value: object) -> str:
        """What is wrong with a value, loosely: scalars and literals only; empty if nothing."""
        if value is None:
            return "" if "None" in self.type or "Optional" in self.type else f"None, want {self.type}"
        allowed = re.search(r"Literal\[(.*?)\]", self.type)
        if allowed and isinstance(value, str):
            names = [name.strip(" '\"") for name in allowed[1].split(",")]
            return "" if value in names else f"{value!r}, want one of {', '.join(names)}"
        scalar = re.match(r"(?:Optional\[)?(int|float|bool|str)\b", self.type)
        if scalar is None:
            return ""
        is_wrong_bool = isinstance(value, bool) and scalar[1] in ("int", "float")
        if is_wrong_bool or not isinstance(value, _SCALARS[scalar[1]]):
            return f"{type(value).__name__}, want {self.type}"
        return ""


class Contract:
    """The contract of one library."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.package: str = content["package"]
        self.version: str = content["pinned"]
        self.classes: Mapping[str, Mapping[str, Any]] = content["classes"]
        self.cli: Mapping[str, Mapping[str, Any]] = content["cli"]
        self.stats: Mapping[str, Any] = content["stats"]

    @staticmethod
    @cache
    def load(name: str) -> Contract:
        """The contract of an engine kind that has one."""
        return Contract(json.loads((FOLDER / f"{name}.json").read_text()))

    def parameters(self, class_name: str) -> dict[str, Parameter]:
        """Arguments of a class, those of its bases first."""
        entry = self.classes[class_name]
        found: dict[str, Parameter] = {}
        for base in entry.get("bases", ()):
            found |= self.parameters(base)
        return found | _parameters(entry.get("params", ()))

    def method_parameters(self, class_name: str, method: str) -> dict[str, Parameter]:
        """Arguments of a method."""
        return _parameters(self.classes[class_name]["methods"][method].get("params", ()))

    def problems(self, class_name: str, arguments: Mapping[str, object]) -> list[str]:
        """What is wrong with the arguments of a call; empty if nothing that the contract knows of."""
        known = self.parameters(class_name)
        found = [
            f"{class_name}: no argument {name!r}"
            for name in arguments
            if name not in known and "kwargs" not in known
        ]
        for name, parameter in known.items():
            if name not in arguments:
                if parameter.is_required:
                    found.append(f"{class_name}: {name} is required")
                continue
            problem = parameter.problem(arguments[name])
            # Plug-ins are also switched by words, which the library reads as True and False or None.
            if problem and not (class_name == "PluginConfig" and arguments[name] in _SWITCH_WORDS):
                found.append(f"{class_name}.{name}: {problem}")
        return found

    def flags(self, program: str) -> frozenset[str]:
        """Options of a command-line program, without their dashes."""
        names = set(self.cli[program].get("plugin_flags", ()))
        for text in self.cli[program]["flags"]:
            for part in text.split(" + ")[0].split("/"):
                match = _FLAG_NAME.match(part)
                if match:
                    names.add(match[1])
        return frozenset(names)

    def flag_problems(self, program: str, words: Sequence[str]) -> list[str]:
        """What is wrong with a command line, the program's name left out; empty if nothing that is known.

        Switches take no value, all other flags at least one; those of plug-ins and of sizes must be what the
        classes that they end up in take.
        """
        known, switches = self.flags(program), self.cli[program].get("switches", ())
        found = []
        for name, values in flag_values(words):
            if name not in known:
                found.append(f"{program}: no option --{name}")
            elif name in switches:
                found += [f"{program}: --{name} takes no value, not {values}"] if values else []
            elif not values:
                found.append(f"{program}: --{name} has no value")
            else:
                found += self._value_problems(name, values)
        return found

    def _value_problems(self, name: str, values: list[str]) -> list[str]:
        for class_name in ("PluginConfig", "BuildConfig"):
            parameter = self.parameters(class_name).get(name)
            if parameter is None:
                continue
            is_number = re.match(r"(?:Optional\[)?int\b", parameter.type) is not None
            if parameter.type == "bool":
                problem = "" if values[0] in _SWITCH_WORDS else f"{values[0]!r}, want enable or disable"
            elif is_number:
                problem = "" if values[0].isdecimal() else f"{values[0]!r}, want a whole number"
            elif class_name == "PluginConfig" and values[0] == "disable":
                problem = ""
            else:
                problem = parameter.problem(values[0])
            if not problem and len(values) > 1:
                problem = "more than one value"
            return [f"{class_name}.{name}: {problem}"] if problem else []
        return []


def flag_values(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The options of a command line with their values, in their order; a word before the first is one too."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            found.append((word[2:], []))
        elif found:
            found[-1][1].append(word)
        else:
            found.append((word, []))
    return found


def _parameters(entries: Any) -> dict[str, Parameter]:
    return {
        entry["name"]: Parameter(
            entry["name"], entry["type"], entry["default"], entry["kind"] == "positional_or_keyword"
        )
        for entry in entries
    }
