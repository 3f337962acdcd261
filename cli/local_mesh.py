"""All processes of a mesh on this machine, as `enginemesh up` and `enginemesh demo` start them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count, product
from typing import TYPE_CHECKING

from cli import child_logs
from cli.client import Client
from cli.embedded import S3_STOP_LIMIT_S, STOP_LIMIT_S, free_port, is_free, start_s3, start_valkey
from cli.failures import CommandError
from cli.local_keys import local_keys
from cli.options import ENVIRONMENT_FILE
from cli.supervisor import Child, ChildSpec, Supervisor
from cli.tether import tethered
from mesh.settings import ClientSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from typing_extensions import Self

    from cli.embedded import Service

START_LIMIT_S = 60.0
SERVICE_SLACK_S = 5.0
"""What a service may take beyond its drain time until it is killed."""

MANY_FAILURES = 3
"""A process that ended this often in a row while the mesh starts is not going to run."""

LOG_LINES_SHOWN = 15

GATEWAY_INDEX, BUILDER_INDEX, FIRST_WORKER_INDEX = range(3)
"""What is added to ENGINEMESH_METRICS_PORT for the port of each process."""


@dataclass(frozen=True)
class Plan:
    """What to start.

    Attributes:
        data_dir: Where everything is kept.
        port: Of the gateway, on loopback.
        kind: Engine kind that the workers handle.
        models: One group of inference workers serves each.
        workers: Inference workers for each model to begin with.
        source_roots: Folders whose models the build worker may read.
        has_builder: Whether there is a build worker.
    """

    data_dir: Path
    port: int
    kind: str
    models: tuple[str, ...] = ()
    workers: int = 1
    source_roots: tuple[Path, ...] = ()
    has_builder: bool = True


@dataclass
class LocalMesh:
    """A mesh on this machine: `with` starts it and stops it.

    Valkey and an S3 server are started too, unless ENGINEMESH_REDIS_URL and ENGINEMESH_S3_ENDPOINT name
    others. Engines are signed, with a key that is made at the first start (cli/local_keys.py). What a
    further process needs to join stands in `<data_dir>/mesh.env`. With ENGINEMESH_METRICS_PORT set, the
    gateway serves its metrics there, and each other process at the next higher port.

    Args:
        plan: What to start.
        report: Called with lines for people.
        echo: Called with process name and each line that it prints; None: only to its log file.
    """

    plan: Plan
    report: Callable[[str], None]
    echo: Callable[[str, str], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._settings = ClientSettings(data_dir=self.plan.data_dir.resolve())
        self._data_dir = self._settings.data_dir
        self._supervisor = Supervisor(self._data_dir / "logs", self.report, self.echo)
        self._services: list[Child] = []
        self._workers: dict[int, tuple[str, Child]] = {}

    @property
    def address(self) -> str:
        """Of the gateway."""
        return f"127.0.0.1:{self.plan.port}"

    def __enter__(self) -> Self:
        if not is_free(self.plan.port):
            raise CommandError(f"port {self.plan.port} is taken; choose another with --port")
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._data_dir / "up.lock")
        try:
            self.environment["ENGINEMESH_DATA_DIR"] = str(self._data_dir)
            self._start_stores()
            self.environment.update(local_keys(self._settings))
            self._write_environment()
            self._start_services()
        except BaseException:  # also Ctrl-C: what was started must not stay
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def processes(self) -> dict[str, Child]:
        """Every process, by the name of its log file."""
        return {child.spec.name: child for child in self._supervisor.children}

    def client(self) -> Client:
        """A client of the gateway."""
        return Client(self.address, self._settings.max_message_bytes)

    def wait_until_serving(self, service: str, limit_s: float) -> None:
        """Waits until the gateway ("") or a model serves.

        Raises:
            CommandError: a process keeps failing, or `limit_s` seconds have passed.
        """
        deadline = time.monotonic() + limit_s

        def check() -> None:
            self.check()
            if time.monotonic() > deadline:
                what = f"model {service}" if service else "the gateway"
                raise CommandError(f"{what} does not serve after {limit_s:.0f} s; see {self._log_folder}")

        with self.client() as client:
            client.wait_until_serving(service, check)

    def check(self) -> None:
        """Raises CommandError, with the end of its log, if a process keeps failing."""
        for child in (*self._services, *(worker for _, worker in self._workers.values())):
            if child.failures_in_a_row >= MANY_FAILURES:
                name = child.spec.name
                lines = child_logs.tail(self._log_folder / f"{name}.log", LOG_LINES_SHOWN)
                raise CommandError("\n".join([f"{name} does not stay up; its log ends with:", *lines]))

    def workers(self, model: str) -> list[Child]:
        """The inference workers of a model that were not told to stop."""
        return [child for of, child in self._workers.values() if of == model and not child.is_stopping]

    def add_worker(self, model: str) -> Child:
        """Starts one more inference worker for a model of the plan.

        Raises:
            RuntimeError, OSError: it did not start.
        """
        self._workers = {place: worker for place, worker in self._workers.items() if not worker[1].has_ended}
        place = next(place for place in count() if place not in self._workers)
        prefix = f"worker-{model}-" if len(self.plan.models) > 1 else "worker-"
        taken = {child.spec.name for _, child in self._workers.values()}
        name = next(name for number in count(1) if (name := f"{prefix}{number}") not in taken)
        settings = {"ENGINEMESH_KINDS": self.plan.kind, "ENGINEMESH_MODEL": model}
        spec = self._service(name, "infer_worker.main", FIRST_WORKER_INDEX + place, settings)
        child = self._supervisor.add(self._worker_stage, spec)
        self._workers[place] = model, child
        return child

    def retire_worker(self, worker: Child) -> None:
        """Has a worker finish what it runs, then stops it; returns at once."""
        self._supervisor.retire(worker)

    @property
    def _log_folder(self) -> Path:
        return self._supervisor.log_folder

    def _start_stores(self) -> None:
        stores = []
        if "redis_url" not in self._settings.model_fields_set:
            folder = self._data_dir / "valkey"
            port = free_port()
            valkey = self._store(lambda: start_valkey(folder, port))
            stores.append(ChildSpec("valkey", valkey, STOP_LIMIT_S))
        if "s3_endpoint" not in self._settings.model_fields_set:
            s3_folder = self._data_dir / "s3"
            s3_port = free_port()
            s3 = self._store(lambda: start_s3(s3_folder, s3_port))
            stores.append(ChildSpec("s3", s3, S3_STOP_LIMIT_S, is_kill_news=False))
        try:
            self._supervisor.start(*stores)
        except (OSError, RuntimeError) as error:
            raise CommandError(str(error)) from error

    def _store(self, start: Callable[[], Service]) -> Callable[[], subprocess.Popen[bytes]]:
        def start_and_note_address() -> subprocess.Popen[bytes]:
            service = start()
            self.environment.update(service.settings)
            return service.process

        return start_and_note_address

    def _start_services(self) -> None:
        plan = self.plan
        roots = os.pathsep.join(str(root.resolve()) for root in plan.source_roots)
        specs = []
        if plan.has_builder:
            settings = {"ENGINEMESH_KINDS": plan.kind, "ENGINEMESH_SOURCE_ROOTS": roots}
            specs.append(self._service("build-worker", "build_worker.main", BUILDER_INDEX, settings))
        self._worker_stage = self._supervisor.start(*specs)
        self._services += self._worker_stage
        for model, _ in product(plan.models, range(plan.workers)):
            self.add_worker(model)
        # The gateway comes last and so stops first: it ends its streams while the workers still run.
        gateway = self._service("gateway", "gateway.main", GATEWAY_INDEX, {"ENGINEMESH_PORT": str(plan.port)})
        self._services += self._supervisor.start(gateway)
        self.wait_until_serving("", START_LIMIT_S)

    def _service(self, name: str, module: str, index: int, settings: Mapping[str, str]) -> ChildSpec:
        if self._settings.metrics_port:
            settings = {**settings, "ENGINEMESH_METRICS_PORT": str(self._settings.metrics_port + index)}

        def start() -> subprocess.Popen[bytes]:
            # A session of its own: Ctrl-C in the terminal must reach the supervisor only, which then
            # stops its children in order.
            return subprocess.Popen(
                tethered([sys.executable, "-m", module]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment, **settings},
                start_new_session=True,
                cwd=self._data_dir,  # Python would import a folder named "gateway" from the user's
            )

        return ChildSpec(name, start, self._settings.drain_timeout_s + SERVICE_SLACK_S)

    def _write_environment(self) -> None:
        path = self._data_dir / ENVIRONMENT_FILE
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)  # it holds the S3 server's keys
        lines = [f"{name}={value}\n" for name, value in self.environment.items()]
        path.write_text("".join([*lines, f"ENGINEMESH_GATEWAY={self.address}\n"]))

    def _stop(self) -> None:
        try:
            self._supervisor.stop()
        finally:
            (self._data_dir / ENVIRONMENT_FILE).unlink(missing_ok=True)
            os.close(self._lock)


def _lock(path: Path) -> int:
    """Makes sure that one mesh at a time uses a folder; the kernel lets go of it when this process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CommandError(
            f"a mesh already runs in {path.parent}; choose another folder with --data"
        ) from None
    return descriptor
