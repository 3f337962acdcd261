"""Faults that `enginemesh chaos` plays on the processes of a local mesh."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import redis

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from cli.local_mesh import LocalMesh

WORKER_PREFIX = "worker-"
SHORT_STOP_S = (1.5, 4.0)
GATEWAY_STOP_S = (0.5, 9.0)
"""From a hiccup to well over the lease."""
REDIS_PAUSE_S = (1.0, 5.0)


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        play: Does it, and returns once it is over, or at once for what does not end.
        weight: How often it is drawn, relative to the others.
        is_death: Whether a worker or its engine dies of it.
    """

    name: str
    play: Callable[[LocalMesh, random.Random], None]
    weight: int
    is_death: bool = False


def _worker(mesh: LocalMesh, chance: random.Random) -> int | None:
    """The process id of a worker that runs."""
    names = sorted(name for name in mesh.processes if name.startswith(WORKER_PREFIX))
    return mesh.processes[chance.choice(names)].process_id


def _signal(process_id: int | None, number: signal.Signals) -> bool:
    if process_id is None:
        return False
    try:
        os.kill(process_id, number)
    except ProcessLookupError:
        return False
    return True


def kill_worker(mesh: LocalMesh, chance: random.Random) -> None:
    """SIGKILL."""
    _signal(_worker(mesh, chance), signal.SIGKILL)


def terminate_worker(mesh: LocalMesh, chance: random.Random) -> None:
    """SIGTERM: it drains."""
    _signal(_worker(mesh, chance), signal.SIGTERM)


def stop_worker(mesh: LocalMesh, chance: random.Random) -> None:
    """SIGSTOP for longer than the silence limit, then SIGCONT: alive, socket open, silent."""
    process_id = _worker(mesh, chance)
    if _signal(process_id, signal.SIGSTOP):
        time.sleep(chance.uniform(*SHORT_STOP_S))
        _signal(process_id, signal.SIGCONT)


def kill_engine(mesh: LocalMesh, chance: random.Random) -> None:
    """SIGKILL to the engine's process, as when its library aborts."""
    process_id = _worker(mesh, chance)
    if process_id is None:
        return
    try:
        children = psutil.Process(process_id).children()
    except psutil.NoSuchProcess:
        return
    for child in children:
        _signal(child.pid, signal.SIGKILL)


def stop_gateway(mesh: LocalMesh, chance: random.Random) -> None:
    """SIGSTOP, at times for longer than its lease, then SIGCONT."""
    process_id = mesh.processes["gateway"].process_id
    if _signal(process_id, signal.SIGSTOP):
        time.sleep(chance.uniform(*GATEWAY_STOP_S))
        _signal(process_id, signal.SIGCONT)


def pause_redis(mesh: LocalMesh, chance: random.Random) -> None:
    """Redis answers nobody for a while."""
    seconds = chance.uniform(*REDIS_PAUSE_S)
    with _redis(mesh) as client:
        client.client_pause(round(seconds * 1000))
    time.sleep(seconds)


def flush_redis(mesh: LocalMesh, chance: random.Random) -> None:
    """Redis loses all its data."""
    del chance
    with _redis(mesh) as client:
        client.flushall()


def restart_redis(mesh: LocalMesh, chance: random.Random) -> None:
    """Redis is killed, and started again with the data of its append-only file."""
    del chance
    if "valkey" in mesh.processes:
        _signal(mesh.processes["valkey"].process_id, signal.SIGKILL)


FAULTS = (
    Fault("worker SIGKILL", kill_worker, 6, is_death=True),
    Fault("worker SIGTERM", terminate_worker, 3, is_death=True),
    Fault("worker SIGSTOP", stop_worker, 3),
    Fault("engine SIGKILL", kill_engine, 4, is_death=True),
    Fault("gateway SIGSTOP", stop_gateway, 2),
    Fault("redis paused", pause_redis, 2),
    Fault("redis data lost", flush_redis, 1),
    Fault("redis restarted", restart_redis, 1),
)


def draw(chance: random.Random) -> Fault:
    """The next fault."""
    return chance.choices(FAULTS, [fault.weight for fault in FAULTS])[0]


def _redis(mesh: LocalMesh) -> redis.Redis:
    return redis.Redis.from_url(mesh.environment["ENGINEMESH_REDIS_URL"], socket_timeout=10)
