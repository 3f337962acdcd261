"""`enginemesh targets`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from cli.options import JsonOption  # noqa: TC001 - typer reads it at run time
from cli.tables import print_table, size
from mesh.gpus import EIGHTHS, GPUS, named_gpu, target_names
from mesh.nvml import all_gpus
from mesh.precisions import supported_precisions
from mesh.target import Target, detect_cpu

COLUMNS = ("TARGET", "COMPUTE", "MEMORY>", "SMS>", "BANDWIDTH>", "FP8", "NVFP4", "MIG SLICES")
HOST_COLUMNS = ("THIS HOST", "COUNT>", "KEY", "DEVICE", "MEMORY>")
_TB = 10**12


def targets(*, as_json: JsonOption = False) -> None:
    """List the hardware that model files can name, and what this host is.

    A slice is named <gpu>:mig-<profile>, such as h200:mig-1g.18gb. A CPU's name is made of its
    architecture and instruction set.
    """
    here = [*(gpu.target for gpu in all_gpus()), detect_cpu()]
    if as_json:
        known = [_known(name) for name in target_names()]
        print(json.dumps({"known": known, "this_host": [_describe(target) for target in here]}, indent=2))
        return
    print_table(COLUMNS, map(_row, GPUS), "")
    print()
    counts = Counter(target.key for target in here)
    alike = {target.key: target for target in here}
    print_table(HOST_COLUMNS, [_host_row(alike[key], count) for key, count in counts.items()], "")


def _row(key: str) -> tuple[str, ...]:
    gpu = GPUS[key]
    able = gpu.precisions
    return (
        key,
        gpu.compute_capability,
        size(gpu.memory_bytes),
        str(gpu.multiprocessors),
        f"{gpu.bandwidth / _TB:.2f} TB/s",
        "yes" if "fp8" in able else "",
        "yes" if "nvfp4" in able else "",
        " ".join(profile.name for profile in gpu.mig_profiles),
    )


def _host_row(target: Target, count: int) -> tuple[str, ...]:
    return (target.name, str(count), target.key, target.device_name, size(target.memory_bytes))


def _describe(target: Target) -> dict[str, Any]:
    """A target in plain numbers; fields as in enginemesh.v1.Target."""
    described = {"name": target.name, "key": target.key, **target.model_dump()}
    if target.device_type == "gpu":
        described["precisions"] = supported_precisions(target.compute_capability)
    return described


def _known(name: str) -> dict[str, Any]:
    found = named_gpu(name)
    assert found is not None  # noqa: S101 - the name is one of the table's
    gpu, profile = found
    share = profile.memory_slices if profile else EIGHTHS
    return {
        **_describe(Target.from_name(name)),
        "bandwidth_bytes_per_s": gpu.bandwidth * share // EIGHTHS,
        "instances": profile.instances if profile else 1,
    }
