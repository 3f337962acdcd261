"""Real servers for tests: Valkey and S3, each started once per run; every test gets names of its own."""

from __future__ import annotations

import uuid

import pytest

from cli.embedded import start_s3, start_valkey
from mesh.bus.connection import connect


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    """A running Valkey."""
    service = start_valkey(tmp_path_factory.mktemp("valkey"))
    yield service
    service.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A running S3 server."""
    service = start_s3(tmp_path_factory.mktemp("s3"))
    yield service
    service.stop()


@pytest.fixture
async def redis(valkey):
    """A connection to an emptied Valkey."""
    client = connect(valkey.settings["ENGINEMESH_REDIS_URL"])
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def store_settings(s3, tmp_path):
    """Environment that points at the S3 server and a bucket of this test alone."""
    return {
        **s3.settings,
        "ENGINEMESH_S3_BUCKET": f"test-{uuid.uuid4().hex[:12]}",
        "ENGINEMESH_DATA_DIR": str(tmp_path / "data"),
    }
