"""Log lines name their trace, in both forms and from both kinds of logger."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, structlog
from opentelemetry.sdk.trace import TracerProvider
from mesh import logging as mesh_logging
from mesh.settings import MeshSettings

mesh_logging.configure(MeshSettings())
log = structlog.get_logger()
with TracerProvider().get_tracer("test").start_as_current_span("work"):
    log.info("taken", request_id="r1")
    logging.getLogger("library").warning("library says %s", "hello")
log.debug("hidden")
secret = "key-123"
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def _lines(log_format):
    environment = {"ENGINEMESH_LOG_FORMAT": log_format, "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == ""
    return done.stderr


def test_json_lines_carry_trace_ids():
    taken, library, failed = (json.loads(line) for line in _lines("json").splitlines())
    assert taken["event"] == "taken"
    assert taken["request_id"] == "r1"
    assert len(taken["trace_id"]) == 32
    assert len(taken["span_id"]) == 16
    assert library["event"] == "library says hello"
    assert library["level"] == "warning"
    assert library["trace_id"] == taken["trace_id"]
    assert "trace_id" not in failed
    assert failed["exception"][0]["exc_type"] == "ZeroDivisionError"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_debug_lines_and_local_variables_are_not_shown(log_format):
    text = _lines(log_format)
    assert "hidden" not in text
    assert "key-123" not in text
    assert "ZeroDivisionError" in text
