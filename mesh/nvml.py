"""NVIDIA GPUs and MIG instances of this host, as NVML tells of them, and which of them CUDA would see."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.errors import PreconditionError
from mesh.gpus import find_gpu, plain_profile
from mesh.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_CUDA_MAJOR = 1000
_MIB = 1 << 20

# CUDA cores of a multiprocessor, by compute capability; 128 since then.
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
_CORES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
_CORES_SINCE = 128


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU, or one MIG instance of a GPU.

    Attributes:
        index: Of the GPU, counted as NVML does: by place on the PCI bus.
        uuid: Of the GPU or the instance, such as "GPU-…" or "MIG-…".
        gpu_uuid: Of the GPU.
    """

    index: int
    uuid: str
    gpu_uuid: str
    target: Target


def all_gpus() -> list[GpuDevice]:
    """Every GPU of this host, and in place of one that is in MIG mode its instances. Empty without NVML.

    Raises:
        PreconditionError: NVML is here but fails.
    """
    with _nvml() as nvml:
        if nvml is None:
            return []
        cuda_major = nvml.nvmlSystemGetCudaDriverVersion_v2() // _CUDA_MAJOR
        found: list[GpuDevice] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            found += _devices_of(nvml, index, cuda_major)
        return found


def driver_version() -> str:
    """Version of the NVIDIA driver; empty without one.

    Raises:
        PreconditionError: NVML is here but fails.
    """
    with _nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else ""


@contextmanager
def _nvml() -> Iterator[Any]:
    """The library, initialised; None if this host has no NVIDIA driver."""
    import pynvml  # noqa: PLC0415 - 0.1 s, and hosts without a GPU kind need none

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        raise _failed(error) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _failed(error) from error
    finally:
        pynvml.nvmlShutdown()


def _failed(error: Exception) -> PreconditionError:
    return PreconditionError("NVML_FAILED", "nvml", f"NVML cannot tell of this host's GPUs: {error}")


def _devices_of(nvml: Any, index: int, cuda_major: int) -> list[GpuDevice]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    name = nvml.nvmlDeviceGetName(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    whole = Target(
        device_type="gpu",
        device_name=name,
        compute_capability=f"{major}.{minor}",
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        cuda_major=cuda_major,
        multiprocessors=_multiprocessors(nvml, handle, name, (major, minor)),
    )
    if not _is_partitioned(nvml, handle):
        return [GpuDevice(index, uuid, uuid, whole)]
    return [
        GpuDevice(index, nvml.nvmlDeviceGetUUID(instance), uuid, _slice(nvml, instance, whole))
        for instance in _instances(nvml, handle)
    ]


def _multiprocessors(nvml: Any, handle: Any, name: str, capability: tuple[int, int]) -> int:
    """NVML counts them for MIG instances only."""
    known = find_gpu(name)
    if known is not None:
        return known.multiprocessors
    try:
        return int(nvml.nvmlDeviceGetNumGpuCores(handle)) // _CORES.get(capability, _CORES_SINCE)
    except nvml.NVMLError_NotSupported:
        return 0


def _is_partitioned(nvml: Any, handle: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError_NotFound:  # nothing in this slot
            continue


def _slice(nvml: Any, instance: Any, whole: Target) -> Target:
    attributes = nvml.nvmlDeviceGetAttributes_v2(instance)
    nominal = f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"
    return whole.model_copy(
        update={
            "mig_profile": plain_profile(nvml.nvmlDeviceGetName(instance)) or nominal,
            "memory_bytes": attributes.memorySizeMB * _MIB,
            "multiprocessors": attributes.multiprocessorCount,
        }
    )


def visible_gpus(gpus: Sequence[GpuDevice], environment: Mapping[str, str]) -> list[GpuDevice]:
    """Those that CUDA programs in this environment see, in their order.

    CUDA_VISIBLE_DEVICES names them by index, by UUID or its beginning, or by an instance's UUID; what
    stands behind a name that nothing has is ignored. Of a GPU in MIG mode that is named as a whole, CUDA
    takes the first instance. https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars

    Raises:
        PreconditionError: AMBIGUOUS_HARDWARE, as an index may mean several GPUs here: CUDA counts the fastest
            first unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    names = environment.get(VISIBLE)
    if names is None:
        return list(gpus)
    found: list[GpuDevice] = []
    for name in map(str.strip, names.split(",")):
        if name.isdecimal() and environment.get(ORDER) != "PCI_BUS_ID" and _are_unlike(gpus):
            raise PreconditionError(
                "AMBIGUOUS_HARDWARE",
                f"gpus/{name}",
                f"{VISIBLE}={names} names GPUs by index, and this host's are unlike: name them by UUID, "
                f"or set {ORDER}=PCI_BUS_ID",
            )
        device = next((device for device in gpus if _is_called(device, name)), None)
        if device is None:
            break
        found.append(device)
    return found


def _are_unlike(gpus: Sequence[GpuDevice]) -> bool:
    return len({gpu.target.device_name for gpu in gpus}) > 1


def _is_called(device: GpuDevice, name: str) -> bool:
    if name.isdecimal():
        return device.index == int(name)
    is_uuid = name.startswith(("GPU-", "MIG-"))
    return is_uuid and (device.uuid.startswith(name) or device.gpu_uuid.startswith(name))
