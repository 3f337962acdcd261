"""A module that looks like pynvml to who imports it, for hosts that tests describe.

Only what the mesh uses, by the same names, with the same kinds of results and the same exceptions;
test_nvml.py holds each name against the real package.
"""

# ruff: noqa: N801, N802, N818 -- the names are NVML's

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

MIB = 1 << 20
SLOTS = 7
NVML_DEVICE_MIG_ENABLE = 1


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_Unknown(NVMLError):
    pass


@dataclass
class Instance:
    """A MIG instance as NVML describes it."""

    uuid: str
    name: str
    memory_mib: int
    multiprocessors: int
    slices: int = 1


@dataclass
class Card:
    """A GPU as NVML describes it; `instances` is None outside of MIG mode."""

    uuid: str
    name: str
    capability: tuple[int, int]
    memory_mib: int
    cores: int = 0
    instances: dict[int, Instance] | None = None


@dataclass
class StandIn:
    """The module; `failure` is what initialising it raises."""

    cards: list[Card] = field(default_factory=list)
    cuda: int = 13000
    failure: NVMLError | None = None
    depth: int = 0
    can_count_cores: bool = True

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = NVMLError_DriverNotLoaded
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_Unknown = NVMLError_Unknown
    NVML_DEVICE_MIG_ENABLE = NVML_DEVICE_MIG_ENABLE

    def nvmlInit(self):
        if self.failure is not None:
            raise self.failure
        self.depth += 1

    def nvmlShutdown(self):
        self.depth -= 1

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetName(self, handle):
        return handle.name

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return handle.capability

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=handle.memory_mib * MIB, free=0, used=0)

    def nvmlDeviceGetNumGpuCores(self, handle):
        if not self.can_count_cores:
            raise NVMLError_NotSupported
        return handle.cores

    def nvmlDeviceGetMigMode(self, handle):
        if handle.capability < (8, 0) or handle.capability in {(8, 6), (8, 9)}:
            raise NVMLError_NotSupported
        mode = int(handle.instances is not None)
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle):
        return SLOTS

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, slot):
        if slot not in handle.instances:
            raise NVMLError_NotFound
        return handle.instances[slot]

    def nvmlDeviceGetAttributes_v2(self, handle):
        if not isinstance(handle, Instance):
            raise NVMLError_NotSupported
        return SimpleNamespace(
            multiprocessorCount=handle.multiprocessors,
            gpuInstanceSliceCount=handle.slices,
            memorySizeMB=handle.memory_mib,
        )
