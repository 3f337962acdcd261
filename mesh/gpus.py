"""The GPUs that the mesh knows by name: what `enginemesh plan` reckons with and model files may name.

Compute capabilities: https://developer.nvidia.com/cuda-gpus. Multiprocessors and bandwidth: NVIDIA's data
sheet of each product. Memory: what NVML reports with ECC on, where there is ECC. MIG profiles:
https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html; their memory and
multiprocessors as `nvidia-smi mig -lgip` lists them. H200's figures were read from the device itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mesh.precisions import supported_precisions

_MIB = 1 << 20
_GB_PER_S = 10**9
_GB = 10**9
EIGHTHS = 8


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One way to cut a slice off a GPU.

    Attributes:
        name: Such as "1g.10gb": compute slices, and memory in GB.
        memory_bytes: Of one instance.
        instances: How many of it fit on one GPU.
        multiprocessors: Of one instance; 0 where NVIDIA publishes none.
    """

    name: str
    memory_bytes: int
    instances: int
    multiprocessors: int = 0

    @property
    def memory_slices(self) -> int:
        """Eighths of the GPU's memory, and of its bandwidth."""
        half = self.name.startswith("4g.")  # one fits, and leaves the other half of the memory
        return EIGHTHS // 2 if half else EIGHTHS // self.instances


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A product.

    Attributes:
        key: Its name in model files and on the command line.
        nvml_name: What NVML calls it.
        compute_capability: Such as "9.0".
        memory_bytes: As NVML reports it.
        multiprocessors: Streaming multiprocessors.
        bandwidth: Of the memory, in bytes per second.
        mig_profiles: Empty: it cannot be cut.
    """

    key: str
    nvml_name: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int
    bandwidth: int
    mig_profiles: tuple[MigProfile, ...] = ()

    @property
    def precisions(self) -> list[str]:
        """Number formats that it computes in."""
        return supported_precisions(self.compute_capability)

    def mig_profile(self, name: str) -> MigProfile | None:
        """Its profile of this name."""
        return next((profile for profile in self.mig_profiles if profile.name == name), None)


def _profiles(*rows: tuple[str, int, int, int]) -> tuple[MigProfile, ...]:
    """From rows of name, MiB (0: the GB of its name), instances, multiprocessors."""
    return tuple(
        MigProfile(name, mib * _MIB or _nominal(name), instances, multiprocessors)
        for name, mib, instances, multiprocessors in rows
    )


def _nominal(profile: str) -> int:
    return int(profile.partition(".")[2].removesuffix("gb")) * _GB


_A100_40GB = _profiles(
    ("1g.5gb", 4864, 7, 14),
    ("1g.10gb", 9984, 4, 14),
    ("2g.10gb", 9984, 3, 28),
    ("3g.20gb", 20096, 2, 42),
    ("4g.20gb", 20096, 1, 56),
    ("7g.40gb", 40192, 1, 98),
)
_A100_80GB = _profiles(
    ("1g.10gb", 9728, 7, 14),
    ("1g.20gb", 19968, 4, 14),
    ("2g.20gb", 19968, 3, 28),
    ("3g.40gb", 40448, 2, 42),
    ("4g.40gb", 40448, 1, 56),
    ("7g.80gb", 81152, 1, 98),
)
_H100_SXM = _profiles(
    ("1g.10gb", 9984, 7, 16),
    ("1g.20gb", 20096, 4, 26),
    ("2g.20gb", 20096, 3, 32),
    ("3g.40gb", 40448, 2, 60),
    ("4g.40gb", 40448, 1, 64),
    ("7g.80gb", 81152, 1, 132),
)
_H100_PCIE = _profiles(
    ("1g.10gb", 9984, 7, 0),
    ("1g.20gb", 20096, 4, 0),
    ("2g.20gb", 20096, 3, 0),
    ("3g.40gb", 40448, 2, 0),
    ("4g.40gb", 40448, 1, 0),
    ("7g.80gb", 81152, 1, 114),
)
_H100_NVL = _profiles(
    ("1g.12gb", 0, 7, 0),
    ("1g.24gb", 0, 4, 0),
    ("2g.24gb", 0, 3, 0),
    ("3g.47gb", 0, 2, 0),
    ("4g.47gb", 0, 1, 0),
    ("7g.94gb", 0, 1, 132),
)
_H200 = _profiles(
    ("1g.18gb", 16384, 7, 16),
    ("1g.35gb", 33280, 4, 26),
    ("2g.35gb", 33280, 3, 32),
    ("3g.71gb", 71424, 2, 60),
    ("4g.71gb", 71424, 1, 64),
    ("7g.141gb", 143360, 1, 132),
)
_B200 = _profiles(
    ("1g.23gb", 0, 7, 18),
    ("1g.45gb", 0, 4, 0),
    ("2g.45gb", 0, 3, 0),
    ("3g.90gb", 0, 2, 0),
    ("4g.90gb", 0, 1, 0),
    ("7g.180gb", 0, 1, 0),
)

GPUS: dict[str, GpuModel] = {
    gpu.key: gpu
    for gpu in (
        GpuModel("a10", "NVIDIA A10", "8.6", 23028 * _MIB, 72, 600 * _GB_PER_S),
        GpuModel(
            "a100-pcie-40gb",
            "NVIDIA A100-PCIE-40GB",
            "8.0",
            40960 * _MIB,
            108,
            1555 * _GB_PER_S,
            _A100_40GB,
        ),
        GpuModel(
            "a100-sxm-40gb", "NVIDIA A100-SXM4-40GB", "8.0", 40960 * _MIB, 108, 1555 * _GB_PER_S, _A100_40GB
        ),
        GpuModel(
            "a100-pcie-80gb", "NVIDIA A100 80GB PCIe", "8.0", 81920 * _MIB, 108, 1935 * _GB_PER_S, _A100_80GB
        ),
        GpuModel(
            "a100-sxm-80gb", "NVIDIA A100-SXM4-80GB", "8.0", 81920 * _MIB, 108, 2039 * _GB_PER_S, _A100_80GB
        ),
        GpuModel("l4", "NVIDIA L4", "8.9", 23034 * _MIB, 58, 300 * _GB_PER_S),
        GpuModel("l40s", "NVIDIA L40S", "8.9", 46068 * _MIB, 142, 864 * _GB_PER_S),
        GpuModel("rtx-4090", "NVIDIA GeForce RTX 4090", "8.9", 24564 * _MIB, 128, 1008 * _GB_PER_S),
        GpuModel(
            "h100-pcie-80gb", "NVIDIA H100 PCIe", "9.0", 81559 * _MIB, 114, 2000 * _GB_PER_S, _H100_PCIE
        ),
        GpuModel(
            "h100-sxm-80gb", "NVIDIA H100 80GB HBM3", "9.0", 81559 * _MIB, 132, 3350 * _GB_PER_S, _H100_SXM
        ),
        GpuModel("h100-nvl-94gb", "NVIDIA H100 NVL", "9.0", 95830 * _MIB, 132, 3900 * _GB_PER_S, _H100_NVL),
        GpuModel("h200", "NVIDIA H200", "9.0", 143771 * _MIB, 132, 4800 * _GB_PER_S, _H200),
        GpuModel("b200", "NVIDIA B200", "10.0", 183359 * _MIB, 148, 8000 * _GB_PER_S, _B200),
    )
}


def find_gpu(nvml_name: str) -> GpuModel | None:
    """The product that NVML calls by this name; drivers before 470 left the maker out of it."""
    wanted = nvml_name.removeprefix("NVIDIA ")
    return next((gpu for gpu in GPUS.values() if gpu.nvml_name.removeprefix("NVIDIA ") == wanted), None)


def target_names() -> list[str]:
    """Every name that a GPU or a slice of one has in model files, such as "h200:mig-1g.18gb"."""
    return [
        name
        for gpu in GPUS.values()
        for name in (gpu.key, *(slice_name(gpu.key, profile.name) for profile in gpu.mig_profiles))
    ]


def slice_name(key: str, profile: str) -> str:
    """The name of a MIG slice."""
    return f"{key}:mig-{profile}"


def named_gpu(name: str) -> tuple[GpuModel, MigProfile | None] | None:
    """What a name of `target_names` means; None for others."""
    key, _, profile_name = name.partition(":mig-")
    gpu = GPUS.get(key)
    if gpu is None or name == f"{key}:mig-":
        return None
    profile = gpu.mig_profile(profile_name)
    return (gpu, profile) if bool(profile_name) == (profile is not None) else None


_PROFILE = re.compile(r"(?:\d+c\.)?\d+g\.\d+gb")


def plain_profile(text: str) -> str:
    """The MIG profile in a device's name, without what engines do not depend on; empty if there is none.

    "+me", "-me" and "+gfx" give or take media engines and graphics, not compute or memory.
    """
    found = _PROFILE.search(text)
    return found.group() if found else ""
