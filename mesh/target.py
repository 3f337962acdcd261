"""What hardware this is, and what an engine was compiled for."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from enginemesh.v1 import targets_pb2

# Widest first. The names are OpenVINO's families of kernels, folded to what changes the result or the
# speed of an engine.
_X86_INSTRUCTION_SETS = (("amx", "amx_tile"), ("avx512", "avx512f"), ("avx2", "avx2"))
INSTRUCTION_SET_ORDER = ("baseline", "neon", "avx2", "avx512", "amx")
_OPENVINO_ISA_LIMITS = {
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512",
}


class Target(BaseModel):
    """Hardware that an engine is compiled for, or that a worker was found on.

    Fields have the units and meanings of enginemesh.v1.Target.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_type: Literal["gpu", "cpu"]
    device_name: str
    compute_capability: str = ""
    mig_profile: str = ""
    memory_bytes: int = 0
    cuda_major: int = 0
    architecture: str = ""
    instruction_set: str = ""
    multiprocessors: int = 0

    @property
    def key(self) -> str:
        """A short name of everything that an engine depends on; builds queue under it.

        Two devices share a key exactly if the policy "exact" lets them share engines.
        """
        if self.device_type == "cpu":
            return f"cpu-{self.architecture}-{self.instruction_set}"
        capability = "sm" + self.compute_capability.replace(".", "")
        parts = [
            capability,
            _slug(self.device_name),
            f"{round(self.memory_bytes / 2**30)}g",
            f"cuda{self.cuda_major}",
        ]
        if self.mig_profile:
            parts.insert(2, f"mig-{_slug(self.mig_profile)}")
        return "-".join(parts)

    def to_proto(self) -> targets_pb2.Target:
        """The same as enginemesh.v1.Target."""
        return targets_pb2.Target(**self.model_dump(), key=self.key)

    @classmethod
    def from_proto(cls, message: targets_pb2.Target) -> Target:
        """The inverse of to_proto; the key is made anew."""
        return cls(**{name: getattr(message, name) for name in cls.model_fields})


def detect_cpu() -> Target:
    """This host's CPU as a target, limited by OV_CPU_MAX_ISA where that is set."""
    machine = platform.machine().lower()
    architecture = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return Target(
        device_type="cpu",
        device_name=_cpu_name(),
        memory_bytes=psutil.virtual_memory().total,
        architecture=architecture,
        instruction_set=_instruction_set(architecture),
    )


def _instruction_set(architecture: str) -> str:
    if architecture == "aarch64":
        return "neon"
    found = "baseline"
    flags = (
        set(re.findall(r"^flags\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)[:1][0].split())
        if _cpuinfo()
        else set()
    )
    for name, flag in _X86_INSTRUCTION_SETS:
        if flag in flags:
            found = name
            break
    limit = _OPENVINO_ISA_LIMITS.get(os.environ.get("OV_CPU_MAX_ISA", "").upper())
    if limit is None:
        return found
    return min(found, limit, key=INSTRUCTION_SET_ORDER.index)


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
