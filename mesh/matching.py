"""Whether an engine may run on a device: one pure function, asked before any download and again at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mesh.errors import PreconditionError
from mesh.target import INSTRUCTION_SET_ORDER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.manifest import Manifest
    from mesh.target import Target

Policy = Literal["exact", "same_compute_capability", "compatible"]


@dataclass(frozen=True, slots=True)
class Match:
    """The verdict on one engine and one device.

    `reasons` is empty for a match; else it says what differs, each with the value that the engine
    expects and the one that was found.
    """

    reasons: tuple[Mismatch, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "match" if self else "; ".join(str(reason) for reason in self.reasons)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing that differs."""

    what: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return f"{self.what}: engine expects {self.expected}, found {self.actual}"


def match(manifest: Manifest, device: Target, versions: Mapping[str, str], policy: Policy = "exact") -> Match:
    """Decides whether an engine may run on a device.

    Args:
        manifest: The engine.
        device: The hardware that was detected.
        versions: Versions of the tools that would run it, by the names that the manifest uses. Every
            version that the manifest names must be the same here.
        policy: exact: the same product and slice. same_compute_capability: any product or slice of the
            same SM. compatible: whatever the engine's code can run on (GPUs: no more than that; CPUs: a
            wider instruction set too).
    """
    reasons = [
        *_device_reasons(manifest.target, device, policy),
        *_version_reasons(manifest.versions, versions),
    ]
    return Match(tuple(reasons))


def require_match(
    manifest: Manifest, device: Target, versions: Mapping[str, str], policy: Policy = "exact"
) -> None:
    """Raises PreconditionError (ENGINE_MISMATCH, with what, expected and actual) unless `match` holds."""
    verdict = match(manifest, device, versions, policy)
    if not verdict:
        first = verdict.reasons[0]
        raise PreconditionError(
            "ENGINE_MISMATCH",
            f"engines/{manifest.digest}",
            f"engine does not fit this device: {verdict}",
            what=first.what,
            expected=first.expected,
            actual=first.actual,
        )


def _device_reasons(expected: Target, actual: Target, policy: Policy) -> list[Mismatch]:
    if expected.device_type != actual.device_type:
        return [Mismatch("device type", expected.device_type, actual.device_type)]
    if expected.device_type == "cpu":
        return _cpu_reasons(expected, actual, policy)
    reasons = _differing(expected, actual, ["compute_capability", "cuda_major"])
    if policy == "exact":
        if expected.product != actual.product:
            reasons += _differing(expected, actual, ["device_name"]) + _memory_reasons(expected, actual)
        reasons += _differing(expected, actual, ["mig_profile"])
    return reasons


def _memory_reasons(expected: Target, actual: Target) -> list[Mismatch]:
    wanted, found = f"{_gib(expected.memory_bytes)} GiB", f"{_gib(actual.memory_bytes)} GiB"
    return [Mismatch("memory", wanted, found)] if wanted != found else []


def _cpu_reasons(expected: Target, actual: Target, policy: Policy) -> list[Mismatch]:
    reasons = _differing(expected, actual, ["architecture"])
    is_same = expected.instruction_set == actual.instruction_set
    is_wider = _rank(actual.instruction_set) > _rank(expected.instruction_set) >= 0
    if not is_same and not (is_wider and policy == "compatible"):
        reasons.append(Mismatch("instruction set", expected.instruction_set, actual.instruction_set))
    return reasons


def _version_reasons(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[Mismatch]:
    return [
        Mismatch(f"{tool} version", version, actual.get(tool, "none"))
        for tool, version in sorted(expected.items())
        if actual.get(tool) != version
    ]


def _differing(expected: Target, actual: Target, names: list[str]) -> list[Mismatch]:
    return [
        Mismatch(
            name.replace("_", " "),
            str(getattr(expected, name)) or "none",
            str(getattr(actual, name)) or "none",
        )
        for name in names
        if getattr(expected, name) != getattr(actual, name)
    ]


def _rank(instruction_set: str) -> int:
    """Place among those that are known; -1 for others, such as one that a later version of the mesh knows."""
    return INSTRUCTION_SET_ORDER.index(instruction_set) if instruction_set in INSTRUCTION_SET_ORDER else -1


def _gib(size: int) -> int:
    return round(size / 2**30)
