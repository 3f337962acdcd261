"""`enginemesh builds log`, `watch`, `cancel` and `delete`."""

from __future__ import annotations

import pytest
from google.longrunning import operations_pb2

from cli.build_actions import new_part
from enginemesh.v1 import builds_pb2
from mesh.errors import NotFoundError


@pytest.fixture
def build(gateway):
    """A build that has ended, at the scripted gateway."""
    done = operations_pb2.Operation(name="operations/b1", done=True)
    done.metadata.Pack(builds_pb2.BuildMetadata(stage=builds_pb2.BUILD_STAGE_DONE))
    done.response.Pack(builds_pb2.BuildResult(engine="engines/cdcdcdcdcdcdcd", size_bytes=1 << 20))
    gateway.operations.append(done)
    gateway.logs["operations/b1"] = "stage convert\nengine cd\n"
    gateway.logs["engines/cd"] = "of the engine\n"
    return done


def test_log_is_printed_as_it_is(build, invoke):
    assert invoke("builds", "log", "b1").stdout == "stage convert\nengine cd\n"
    assert invoke("builds", "log", "operations/b1").stdout == "stage convert\nengine cd\n"
    assert invoke("builds", "log", "engines/cd").stdout == "of the engine\n"


def test_log_is_followed_to_its_end(build, invoke, gateway):
    gateway.logs_to_come = ["stage fetch\n", "stage fetch\nstage convert\n"]
    gateway.logs["operations/b1"] = "stage fetch\nstage convert\nengine cd\n"
    gateway.operations_to_come = [operations_pb2.Operation(name="operations/b1")]

    assert invoke("builds", "log", "b1", "--follow").stdout == "stage fetch\nstage convert\nengine cd\n"


def test_log_that_is_not_kept_is_an_error(build, run_command, gateway):
    gateway.error = NotFoundError("log", "operations/b2")

    status, out, err = run_command("builds", "log", "b2")

    assert (status, out) == (2, "")
    assert err.startswith("error: not found: ")


def test_watch_shows_the_engine(build, invoke):
    assert invoke("builds", "watch", "b1").stdout == (
        "engine cdcdcdcdcdcd is built and published (1.0 MiB)\n"
    )


def test_cancel_and_delete_name_the_operation(build, invoke, gateway):
    invoke("builds", "cancel", "b1")
    invoke("builds", "delete", "b1")

    cancel, delete = gateway.requests
    assert isinstance(cancel, operations_pb2.CancelOperationRequest)
    assert isinstance(delete, operations_pb2.DeleteOperationRequest)
    assert cancel.name == delete.name == "operations/b1"


def test_filter_goes_to_the_gateway(build, invoke, gateway):
    invoke("builds", "--filter", "done = true")

    assert gateway.requests[-1].filter == "done = true"


@pytest.mark.parametrize(
    ("shown", "text", "new"),
    [
        ("", "a\n", "a\n"),
        ("a\n", "a\nb\n", "b\n"),
        ("a\nb\nc\n", "a\n... 2 bytes left out ...\nc\nd\n", "a\n... 2 bytes left out ...\nc\nd\n"),
        ("x" * 300 + "y\n", "... left out ...\n" + "x" * 250 + "y\nz\n", "z\n"),
    ],
)
def test_only_what_is_new_is_shown(shown, text, new):
    assert new_part(shown, text) == new
