"""The hardware that a worker on this host runs its engines on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import structlog

from mesh.errors import PreconditionError
from mesh.kinds import KINDS
from mesh.nvml import VISIBLE, all_gpus, visible_gpus
from mesh.target import detect_cpu

if TYPE_CHECKING:
    from collections.abc import Collection

    from mesh.target import Target

log = structlog.get_logger(__name__)


def detect_target(kinds: Collection[str]) -> Target:
    """The hardware that CUDA would use for kinds that run on GPUs, or the CPU for others.

    With several GPUs it is the first of them: they must be alike, as for tensor parallelism. With none it
    is the CPU all the same, and matching then says of each engine that it expects a GPU.

    Args:
        kinds: Engine kinds of the worker.

    Raises:
        PreconditionError: NVML fails, or it cannot be told which hardware is meant.
    """
    devices = {KINDS[kind].device for kind in kinds if kind in KINDS} - {"any"}
    if len(devices) > 1:
        raise PreconditionError(
            "AMBIGUOUS_HARDWARE",
            "kinds",
            f"a worker runs on CPU or GPU, not on both: its kinds are {', '.join(kinds)}",
        )
    if "gpu" not in devices:
        return detect_cpu()
    visible = visible_gpus(all_gpus(), os.environ)
    if not visible:
        log.warning("no GPU found; this worker runs on the CPU", cuda_visible_devices=os.environ.get(VISIBLE))
        return detect_cpu()
    if len({gpu.target.key for gpu in visible}) > 1:
        names = ", ".join(gpu.target.name for gpu in visible)
        raise PreconditionError(
            "AMBIGUOUS_HARDWARE",
            "gpus/-",
            f"this worker sees GPUs that are not alike ({names}): choose with {VISIBLE}",
        )
    return visible[0].target
