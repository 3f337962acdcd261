"""The object store that tests of this folder share."""

from __future__ import annotations

import uuid

import pytest

from mesh.engine_store import EngineStore
from mesh.object_store import ObjectStore


@pytest.fixture
def connect_store(s3):
    """Makes clients of one bucket of this test alone; `port` leads through a proxy."""
    settings = s3.settings
    bucket = f"test-{uuid.uuid4().hex[:12]}"

    def connect(port: int | None = None, **options) -> ObjectStore:
        return ObjectStore(
            f"127.0.0.1:{port}" if port else settings["ENGINEMESH_S3_ENDPOINT"],
            options.pop("bucket", bucket),
            options.pop("access_key", settings["ENGINEMESH_S3_ACCESS_KEY"]),
            options.pop("secret_key", settings["ENGINEMESH_S3_SECRET_KEY"]),
            **options,
        )

    return connect


@pytest.fixture
def objects(connect_store):
    """A bucket of this test alone."""
    return connect_store()


@pytest.fixture
def store(objects):
    """Its engines."""
    return EngineStore(objects)
