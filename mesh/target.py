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
from mesh.gpus import find_gpu, named_gpu, slice_name, target_names

# Widest first. The names are OpenVINO's families of kernels, folded to what changes the result or the
# speed of an engine.
_X86_INSTRUCTION_SETS = (("amx", "amx_tile"), ("avx512", "avx512f"), ("avx2", "avx2"))
INSTRUCTION_SET_ORDER = ("baseline", "neon", "avx2", "avx512", "amx")
_ISA_LIMITS = {
    "baseline": {"SSE41", "SSE42", "AVX"},
    "avx2": {"AVX2", "AVX2_VNNI", "AVX2_VNNI_2"},
    "avx512": {"AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16"},
}
_CPU_NAME = re.compile(r"cpu-(x86_64|aarch64)-([a-z0-9]+)")

CUDA_MAJOR = 13
"""What a target that is only named is taken to have: the version that today's engine kinds are made with."""


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
    def name(self) -> str:
        """What model files call it; its key where it is no GPU of the table of known ones."""
        gpu = find_gpu(self.device_name) if self.device_type == "gpu" else None
        if gpu is None or (self.mig_profile and gpu.mig_profile(self.mig_profile) is None):
            return self.key
        return slice_name(gpu.key, self.mig_profile) if self.mig_profile else gpu.key

    @property
    def product(self) -> str:
        """What kind of device it is, apart from slices: of a known GPU its key, of others name and memory.

        Memory tells variants of unknown products apart. It says nothing of known ones: there it varies by
        some percent with the driver and with ECC.
        """
        gpu = find_gpu(self.device_name)
        return gpu.key if gpu else f"{_slug(self.device_name)}-{round(self.memory_bytes / 2**30)}g"

    @property
    def key(self) -> str:
        """A short name of everything that an engine depends on; builds queue under it.

        Two devices share a key exactly if the policy "exact" lets them share engines.
        """
        if self.device_type == "cpu":
            return f"cpu-{self.architecture}-{self.instruction_set}"
        parts = ["sm" + self.compute_capability.replace(".", ""), self.product]
        if self.mig_profile:
            parts.append(f"mig-{_slug(self.mig_profile)}")
        return "-".join([*parts, f"cuda{self.cuda_major}"])

    @classmethod
    def from_name(cls, name: str, cuda_major: int = CUDA_MAJOR) -> Target:
        """The target that a model file calls by this name.

        Args:
            name: Such as "h200", "a100-sxm-80gb:mig-1g.10gb" or "cpu-x86_64-avx512".
            cuda_major: CUDA major version of the GPU's host.

        Raises:
            ValueError: there is no such target; says which there are.
        """
        found = named_gpu(name)
        if found is not None:
            gpu, profile = found
            part = profile or gpu
            return cls(
                device_type="gpu",
                device_name=gpu.nvml_name,
                compute_capability=gpu.compute_capability,
                mig_profile=profile.name if profile else "",
                memory_bytes=part.memory_bytes,
                cuda_major=cuda_major,
                multiprocessors=part.multiprocessors,
            )
        cpu = _CPU_NAME.fullmatch(name)
        if cpu is None or cpu[2] not in INSTRUCTION_SET_ORDER:
            raise ValueError(_unknown(name))
        return cls(device_type="cpu", device_name="", architecture=cpu[1], instruction_set=cpu[2])

    def to_proto(self) -> targets_pb2.Target:
        """The same as enginemesh.v1.Target."""
        return targets_pb2.Target(**self.model_dump(), key=self.key)

    @classmethod
    def from_proto(cls, message: targets_pb2.Target) -> Target:
        """The inverse of to_proto; the key is made anew."""
        return cls(**{name: getattr(message, name) for name in cls.model_fields})


def _unknown(name: str) -> str:
    gpu = name.partition(":")[0]
    near = [known for known in target_names() if known.startswith(f"{gpu}:mig-")]
    if near:
        return f"{gpu} has no such slice; there are {', '.join(near)}"
    gpus = [known for known in target_names() if ":" not in known]
    cpus = f"cpu-<x86_64 or aarch64>-<{', '.join(INSTRUCTION_SET_ORDER)}>"
    return (
        f"no target is named {name!r}; there are {', '.join(gpus)} (slices: <gpu>:mig-<profile>) and {cpus}"
    )


def detect_cpu() -> Target:
    """This host's CPU as a target.

    OpenVINO can be kept from using all of it: OV_CPU_MAX_ISA limits its own kernels, ONEDNN_MAX_CPU_ISA
    those of oneDNN inside it. The narrower one counts here; to make a lesser worker set both alike.
    """
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
    flags = re.search(r"^flags\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    present = flags.group(1).split() if flags else []
    found = next((name for name, flag in _X86_INSTRUCTION_SETS if flag in present), "baseline")
    return min(found, *_limits(), key=INSTRUCTION_SET_ORDER.index)


def _limits() -> list[str]:
    names = {os.environ.get(variable, "").upper() for variable in ("OV_CPU_MAX_ISA", "ONEDNN_MAX_CPU_ISA")}
    return [limit for limit, values in _ISA_LIMITS.items() if names & values] or ["amx"]


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
