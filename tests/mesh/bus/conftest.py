"""The bus is tested on Valkey and, where its binary is on the PATH, on Redis 7 too."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import redis as redis_client

from cli import embedded
from mesh.bus.connection import connect

REDIS = shutil.which("redis-server")


def _redis_major() -> int:
    if REDIS is None:
        return 0
    version = subprocess.run([REDIS, "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"v=(\d+)", version).group(1))


SERVERS = ["valkey", "redis7"] if _redis_major() == 7 else ["valkey"]


@pytest.fixture(scope="session")
def redis7(tmp_path_factory):
    """A running Redis 7."""
    folder = tmp_path_factory.mktemp("redis7")
    port = embedded.free_port()
    process = embedded._spawn(
        [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""],
        folder / "redis.log",
        {},
    )
    with redis_client.Redis(port=port, socket_timeout=1) as client:
        embedded._wait_until(client.ping, process, "Redis", folder / "redis.log")
    service = embedded.Service("redis7", process, {"ENGINEMESH_REDIS_URL": f"redis://127.0.0.1:{port}/0"})
    yield service
    service.stop()


@pytest.fixture(params=SERVERS)
def server(request):
    """A server that the bus runs on."""
    return request.getfixturevalue(request.param)


@pytest.fixture
async def redis(server):
    """A connection to it, emptied."""
    client = connect(server.settings["ENGINEMESH_REDIS_URL"])
    await client.flushall()
    yield client
    await client.aclose()
