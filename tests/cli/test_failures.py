"""Errors are one readable line with the status that scripts can act on."""

from __future__ import annotations

import grpc
import pytest

from cli import failures
from cli.embedded import free_port
from mesh.errors import (
    DeadlineError,
    ExhaustedError,
    IntegrityError,
    InvalidFieldError,
    NotFoundError,
    PreconditionError,
)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidFieldError("model", "is required"), failures.EXIT_REFUSED),
        (NotFoundError("model", "x"), failures.EXIT_REFUSED),
        (ExhaustedError("full", retry_after_s=1), failures.EXIT_TRY_AGAIN),
        (DeadlineError("too late"), failures.EXIT_TRY_AGAIN),
        (PreconditionError("TARGET_MISMATCH", "engines/1", "other GPU"), failures.EXIT_PRECONDITION),
        (IntegrityError("other bytes"), failures.EXIT_FAILED),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error, status):
    assert failures.from_mesh(error).status == status


def test_retry_delay_is_told():
    line = str(failures.from_mesh(ExhaustedError("1 request runs already", retry_after_s=2.5, limit=1)))
    assert line == "resource exhausted: 1 request runs already (reason LIMIT_REACHED, try again in 2.5 s)"


def test_metadata_that_the_message_lacks_is_told():
    error = PreconditionError("TARGET_MISMATCH", "engines/1", "wrong GPU", expected="9.0", actual="8.9")
    assert str(failures.from_mesh(error)) == (
        "failed precondition: wrong GPU (reason TARGET_MISMATCH, actual 8.9, expected 9.0, subject engines/1)"
    )


def test_closed_port_says_how_to_start_a_gateway(run_command):
    address = f"127.0.0.1:{free_port()}"
    status, _, err = run_command("models", "--gateway", address)
    assert status == failures.EXIT_TRY_AGAIN
    assert address in err
    assert "enginemesh up" in err
    assert len(err.splitlines()) == 1


def test_error_without_details_is_told_too(gateway, run_command):
    class Bare:
        def to_status(self):
            status = InvalidFieldError("x", "y").to_status()
            del status.details[:]
            return status

    gateway.error = Bare()
    status, _, err = run_command("models")
    assert status == failures.EXIT_REFUSED
    assert err == "error: invalid argument: x: y\n"


def test_wrong_service_is_told(run_command):
    server = grpc.server(None)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    status, _, err = run_command("models", "--gateway", f"127.0.0.1:{port}")
    server.stop(None).wait()
    assert status == failures.EXIT_REFUSED
    assert err.startswith("error: unimplemented")
