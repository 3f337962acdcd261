"""How many workers a model should have: decided from what its gateway tells, carried out on a local mesh.

The decision is a pure function of figures that `GetModel` gives, so that another scaler, such as one of a
cluster, can go by the same.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from cli.client import Client
    from cli.local_mesh import LocalMesh
    from cli.supervisor import Child
    from enginemesh.v1 import builds_pb2, models_pb2

LOOK_INTERVAL_S = 0.25
FAILED_START_PAUSE_S = 5.0
GROW_AFTER_S = 1.0
"""Requests that wait this long while every slot is in use get one more worker."""

SCALE_DOWN_AFTER_S = 60.0
"""For models whose file does not say."""


@dataclass(frozen=True)
class Limits:
    """Within which a model's workers may vary; see ServingSettings."""

    min_workers: int
    max_workers: int
    scale_down_after_s: float

    @classmethod
    def of(cls, serving: builds_pb2.ServingSettings, max_workers: int) -> Self:
        """What a model says, with `max_workers` if it sets no limit of its own."""
        return cls(
            min_workers=serving.min_workers,
            max_workers=serving.max_workers or max(max_workers, serving.min_workers),
            scale_down_after_s=serving.scale_down_after_s or SCALE_DOWN_AFTER_S,
        )


@dataclass(frozen=True)
class Load:
    """A model at one moment.

    Attributes:
        workers: Those that the scaler has started and not told to stop.
        starting: Of these, those that take no work yet.
        taking: All that take work, whoever started them.
        slots: Of those that take work.
        slots_used: Of those slots.
        waiting: Requests that no worker has taken.
        oldest_wait_s: How long the first of them has waited.
    """

    workers: int
    starting: int = 0
    taking: int = 0
    slots: int = 0
    slots_used: int = 0
    waiting: int = 0
    oldest_wait_s: float = 0.0

    @property
    def has_no_room(self) -> bool:
        """Whether requests wait that no slot and no worker on its way will take in a moment."""
        is_full = self.slots_used >= self.slots
        is_patient = not self.slots or self.oldest_wait_s >= GROW_AFTER_S
        return bool(self.waiting) and not self.starting and is_full and is_patient

    @property
    def needed(self) -> int:
        """The fewest workers that have a slot for everything that runs and waits."""
        requests = self.slots_used + self.waiting
        if not self.slots or not requests:
            return min(requests, 1)
        return math.ceil(requests * self.taking / self.slots)


def desired_workers(load: Load, recently_needed: int, limits: Limits) -> int:
    """How many workers a model should have now.

    One more if there is no room, however much waits: while a worker starts, those that run may make room.
    Otherwise as few as would have had room for all that ran and waited lately.

    Args:
        load: At this moment.
        recently_needed: The most workers that were `needed` within the last `scale_down_after_s`.
        limits: Of the model.
    """
    wanted = load.workers + 1 if load.has_no_room else min(load.workers, recently_needed)
    return min(max(wanted, limits.min_workers), limits.max_workers)


@dataclass
class Demand:
    """Remembers when a model last needed how many workers. Times are of any steady clock."""

    _last_needed: dict[int, float] = field(default_factory=dict)

    def recent(self, load: Load, within_s: float, now: float) -> int:
        """Takes a load in; the most workers that were needed in the last `within_s` seconds."""
        self._last_needed[load.needed] = now
        self._last_needed = {n: at for n, at in self._last_needed.items() if now - at < within_s or at == now}
        return max(self._last_needed)


class Scaler:
    """Starts and stops the workers of a local mesh; `with` runs it in a thread.

    Args:
        mesh: It runs.
        models: Those to scale. One that has no engine yet is left alone until it has.
        max_workers: Workers of each model, unless its serving settings say.
        report: Called with a line for people at each change.
    """

    def __init__(
        self, mesh: LocalMesh, models: Sequence[str], max_workers: int, report: Callable[[str], None]
    ) -> None:
        self._mesh = mesh
        self._demands = {model: Demand() for model in models}
        self._max_workers = max_workers
        self._report = report
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="scaler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with self._mesh.client() as client:
            while not self._stopping.wait(LOOK_INTERVAL_S):
                for model in self._demands:
                    self._look_after(model, client)

    def _look_after(self, model: str, client: Client) -> None:
        try:
            found = client.model(model)
            ready = {w.process_id: w.slots_used for w in client.ready_workers() if w.host == platform.node()}
        except grpc.RpcError:  # as without an engine, or while the gateway is replaced: all stays as it is
            return
        workers = self._mesh.workers(model)
        load = load_of(found, workers=len(workers), starting=sum(w.process_id not in ready for w in workers))
        limits = Limits.of(found.serving, self._max_workers)
        recently_needed = self._demands[model].recent(load, limits.scale_down_after_s, time.monotonic())
        wanted = desired_workers(load, recently_needed, limits)
        try:
            for _ in range(wanted - len(workers)):
                name = self._mesh.add_worker(model).spec.name
                self._report(f"{model}: {load.waiting} waiting; {name} starts")
        except (OSError, RuntimeError) as error:
            self._report(f"{model}: no worker could be started: {error}")
            self._stopping.wait(FAILED_START_PAUSE_S)

        def work(worker: Child) -> int:
            return ready.get(worker.process_id or 0, -1)

        for worker in sorted(workers, key=work)[: max(0, len(workers) - wanted)]:
            self._report(f"{model}: {worker.spec.name} is no longer needed and stops")
            self._mesh.retire_worker(worker)


def load_of(model: models_pb2.Model, *, workers: int, starting: int) -> Load:
    """The load of a model, with what its scaler knows of its own workers."""
    return Load(
        workers=workers,
        starting=starting,
        taking=model.workers,
        slots=model.slots,
        slots_used=model.slots_used,
        waiting=model.queued_requests,
        oldest_wait_s=model.oldest_wait.ToTimedelta().total_seconds(),
    )
