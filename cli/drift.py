"""`enginemesh doctor --kind`: how an engine kind's library differs from what the mesh holds it for.

For where the real library is installed, as the mesh's own tests have a stand-in for it: names of classes,
arguments, members and flags are compared with the contract (mesh/contracts/). Nothing is run on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from cli.checks import Check, State
from mesh.contract import FOLDER, Contract
from mesh.versions import installed_versions

if TYPE_CHECKING:
    from collections.abc import Iterator

HELP_LIMIT_S = 300.0
"""A first import of such a library takes minutes on a cold disk."""

_FLAG = re.compile(r"--([a-z][a-z0-9_-]*)")
_ARGUMENT = re.compile(r"^\*{0,2}([A-Za-z_]\w*)")
_NEEDED_MODULE = "tensorrt_llm.bindings.executor"
"""What engines are run with: without any of it they do not run, while the rest is for people who build."""


def kinds() -> list[str]:
    """Engine kinds that have a contract."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def check_drift(kind: str) -> list[Check]:
    """Compares the installed library of a kind with its contract."""
    contract = Contract.load(kind)
    found = installed_versions(contract.package)[contract.package]
    try:
        importlib.import_module(contract.package.replace("-", "_"))
    except Exception as error:  # noqa: BLE001 - a library that fails to load may fail in any way
        detail = f"{contract.package} {found} cannot be imported: {type(error).__name__}: {error}"
        return [Check(kind, State.failed, detail, "run this where the engine kind is installed")]
    is_pinned = found == contract.version
    version = Check(
        f"{contract.package} version",
        State.ok if is_pinned else State.failed,
        found,
        "" if is_pinned else f"the mesh is written for {contract.version}",
    )
    classes = [_class_check(contract, name) for name in contract.classes]
    return [version, *classes, *(_program_check(contract, program) for program in contract.cli)]


def _class_check(contract: Contract, name: str) -> Check:
    entry = contract.classes[name]
    bad = State.failed if entry["module"] == _NEEDED_MODULE else State.missing
    title = f"{entry['module']}.{name.rpartition('.')[2]}"
    try:
        found = getattr(importlib.import_module(entry["module"]), name.rpartition(".")[2])
    except Exception as error:  # noqa: BLE001 - see check_drift
        return Check(title, bad, f"not found: {type(error).__name__}: {error}")
    differences = list(_differences(contract, name, found))
    lacks = [text for text in differences if not text.startswith("new")]
    detail = "; ".join(differences) or "as expected"
    return Check(title, bad if lacks else State.ok, detail, f"evidence: {entry['evidence']}" if lacks else "")


def _differences(contract: Contract, name: str, found: Any) -> Iterator[str]:
    """What the library's class lacks of the contract, and what it has beside."""
    entry = contract.classes[name]
    if entry["kind"] == "enum" or (entry["kind"] == "binding" and not entry.get("params")):
        members = {re.split("[ .:]", attribute)[0] for attribute in entry.get("attributes", ())}
        yield from (f"no {member}" for member in sorted(members) if not _has(found, member))
    for method in entry.get("methods", {}):
        if not any(hasattr(found, spelling) for spelling in method.split("/")):
            yield f"no method {method}"
    wanted = contract.parameters(name)
    if not wanted:
        return
    actual = arguments_of(found)
    if actual is None:
        yield "its arguments cannot be read"
        return
    takes_any = "kwargs" in actual
    yield from (f"no argument {key}" for key in wanted if key not in actual and not takes_any)
    if "kwargs" not in wanted:
        yield from (f"new argument {key}" for key in sorted(actual - wanted.keys() - {"kwargs"}))


def _has(found: Any, member: str) -> bool:
    return hasattr(found, member) or member in inspect.get_annotations(found)


def arguments_of(found: Any) -> frozenset[str] | None:
    """Names of the arguments of a class of any sort; None if they cannot be read."""
    if hasattr(found, "model_fields"):
        return frozenset(found.model_fields)
    if dataclasses.is_dataclass(found):
        return frozenset(field.name for field in dataclasses.fields(found) if field.init)
    text = _binding_signatures(found.__init__)
    if text:
        return frozenset(name for signature in text for name in _names(signature))
    try:
        return frozenset(inspect.signature(found.__init__).parameters) - {"self"}
    except (TypeError, ValueError):
        return None


def _binding_signatures(function: Any) -> list[str]:
    """What nanobind says of a function's overloads, each as "__init__(self, name: type = value, ...)"."""
    overloads = getattr(function, "__nb_signature__", None)
    lines = [one[0] for one in overloads] if overloads else (function.__doc__ or "").splitlines()
    return [line for line in lines if "__init__(self" in line]


def _names(signature: str) -> Iterator[str]:
    """Names of the arguments in a signature's text."""
    depth, part = 0, ""
    for letter in signature[signature.index("(") + 1 :]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0 or (letter == "," and depth == 0):
            match = _ARGUMENT.match(part.strip())
            if match and match[1] != "self":
                yield match[1]
            part = ""
            if depth < 0:
                return
        else:
            part += letter


def _program_check(contract: Contract, program: str) -> Check:
    path = shutil.which(program)
    if path is None:
        return Check(program, State.missing, "not on PATH")
    try:
        run = subprocess.run(
            [path, "--help"], capture_output=True, text=True, check=False, timeout=HELP_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(program, State.failed, f"--help: {error}")
    actual = {name.replace("-", "_") for name in _FLAG.findall(run.stdout)}
    if not actual:
        return Check(program, State.failed, f"--help ended with {run.returncode} and names no flag")
    lacks = sorted(contract.flags(program) - actual)
    new = sorted(actual - contract.flags(program) - {"help"})
    parts = [f"no flag {name}" for name in lacks] + [f"new flag {name}" for name in new]
    return Check(program, State.failed if lacks else State.ok, "; ".join(parts) or "as expected")
