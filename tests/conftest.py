"""Real servers for tests: Valkey and S3, each started once per run; every test gets names of its own."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import hypothesis
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cli.embedded import start_s3, start_valkey
from mesh.bus.connection import connect
from mesh.telemetry import SpanIds
from tests.faulty_proxy import FaultyProxy
from tests.sample_engine import build_sample_engine

REPOSITORY = Path(__file__).parent.parent
FIRST_BUILD_LIMIT_S = 600


# Most tests publish engines of a few bytes that nobody signs. Those of signatures, and those of the whole
# local mesh, set what they need.
os.environ["ENGINEMESH_SIGNATURE_POLICY"] = "off"


def pytest_configure():
    """Processes that tests start can be interrupted, though xdist's own ignore that and would hand it on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """The longest files come first, so that none is left over for one process at the end.

    The first test that wants the sample engine waits for its download and build.
    """
    items.sort(key=lambda item: "end_to_end" not in item.nodeid)
    for item in items:
        if "smollm2_engine" in item.fixturenames and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FIRST_BUILD_LIMIT_S))


# A loaded machine is slow, which is no fault of what is tested.
hypothesis.settings.register_profile("mesh", deadline=None)
hypothesis.settings.load_profile("mesh")


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
def proxy(s3):
    """A proxy in front of the S3 server."""
    opened = FaultyProxy(int(s3.settings["ENGINEMESH_S3_ENDPOINT"].rsplit(":", 1)[1]))
    yield opened
    opened.close()


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


@pytest.fixture(scope="session")
def smollm2_engine():
    """SmolLM2-135M-Instruct, built for this CPU by the real builder: its folder and manifest.

    Kept in .cache under its build key, so that only the first run builds it (about 30 s).
    """
    return build_sample_engine(REPOSITORY / ".cache")


@pytest.fixture(scope="session")
def _span_exporter():
    # The global provider can be set but once in a process.
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=SpanIds(), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(_span_exporter):
    """The spans that end in this process during a test; `get_finished_spans` lists them."""
    _span_exporter.clear()
    yield _span_exporter
    _span_exporter.clear()
