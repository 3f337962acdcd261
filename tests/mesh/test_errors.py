"""Every error reaches a client with its code, its reason and the details that AIP-193 asks for."""

from __future__ import annotations

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from mesh import errors

ERRORS = [
    (errors.InvalidFieldError("top_p", "must be at most 1", limit=1), "INVALID_ARGUMENT", "INVALID_FIELD"),
    (errors.NotFoundError("model", "m"), "NOT_FOUND", "NOT_FOUND"),
    (errors.AlreadyExistsError("request", "r"), "ALREADY_EXISTS", "ALREADY_EXISTS"),
    (
        errors.PreconditionError("ENGINE_MISMATCH", "engines/e", "no"),
        "FAILED_PRECONDITION",
        "ENGINE_MISMATCH",
    ),
    (errors.ExhaustedError("full", 1.5), "RESOURCE_EXHAUSTED", "LIMIT_REACHED"),
    (errors.UnavailableError("down", 2), "UNAVAILABLE", "UNAVAILABLE"),
    (errors.DeadlineError("late", tokens_sent=3), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    (errors.UnsupportedError("no logprobs"), "UNIMPLEMENTED", "UNSUPPORTED"),
    (errors.AttemptsExhaustedError("gave up"), "UNAVAILABLE", "ATTEMPTS_EXHAUSTED"),
    (errors.SlowConsumerError("asleep"), "RESOURCE_EXHAUSTED", "SLOW_CONSUMER"),
    (errors.IntegrityError("bad", expected="a"), "DATA_LOSS", "INTEGRITY"),
    (errors.BuildError("broke", stage="compile"), "INTERNAL", "BUILD_FAILED"),
    (errors.BuildLimitError("grew", limit="memory"), "RESOURCE_EXHAUSTED", "BUILD_LIMIT"),
    (errors.BuildCancelledError("stopped"), "CANCELLED", "BUILD_CANCELLED"),
]


@pytest.fixture
async def fail():
    """A call to a real server that ends with an error; gives what the client sees of it."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    raised: list[errors.MeshError] = []

    async def handle(_, context):
        await context.abort_with_status(raised[-1].to_grpc())

    handlers = {"Fail": grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def fail(error: errors.MeshError) -> tuple[grpc.aio.AioRpcError, status_pb2.Status]:
        raised.append(error)
        with pytest.raises(grpc.aio.AioRpcError) as seen:
            await channel.unary_unary("/test/Fail")(b"")
        return seen.value, rpc_status.from_call(seen.value)

    yield fail
    await channel.close()
    await server.stop(None)


def details(status: status_pb2.Status, kind):
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            return message
    return None


def test_every_error_is_listed_here():
    public = {
        each
        for name, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, errors.MeshError) and not name.startswith("_")
    }
    assert public - {errors.MeshError} == {type(error) for error, _, _ in ERRORS}


@pytest.mark.parametrize(("error", "code", "reason"), ERRORS, ids=lambda value: type(value).__name__)
async def test_client_sees_code_message_reason_and_metadata(fail, error, code, reason):
    seen, status = await fail(error)

    assert seen.code().name == code
    assert seen.details() == str(error) == error.message
    info = details(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, "enginemesh", error.metadata)


async def test_client_sees_the_field(fail):
    _, status = await fail(errors.InvalidFieldError("sampling.top_p", "must be at most 1", limit=1))

    assert status.message == "sampling.top_p: must be at most 1"
    violation = details(status, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("sampling.top_p", "must be at most 1")
    assert details(status, error_details_pb2.ErrorInfo).metadata["limit"] == "1"


async def test_client_sees_the_resource(fail):
    _, status = await fail(errors.NotFoundError("model", "gpt-0"))

    assert status.message == "no model named 'gpt-0'"
    resource = details(status, error_details_pb2.ResourceInfo)
    assert (resource.resource_type, resource.resource_name) == ("model", "gpt-0")


async def test_client_sees_the_precondition(fail):
    _, status = await fail(errors.PreconditionError("DISK_FULL", "/cache", "no room", size=5))

    violation = details(status, error_details_pb2.PreconditionFailure).violations[0]
    assert (violation.type, violation.subject, violation.description) == ("DISK_FULL", "/cache", "no room")


@pytest.mark.parametrize("kind", [errors.ExhaustedError, errors.UnavailableError])
@pytest.mark.parametrize(("seconds", "milliseconds"), [(1.5, 1500), (0, 1), (0.0001, 1)])
async def test_client_sees_when_to_try_again(fail, kind, seconds, milliseconds):
    _, status = await fail(kind("later", seconds))

    assert details(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == milliseconds


@pytest.mark.parametrize("text", ["x" * 100_000, "삼" * 100_000, "\N{PILE OF POO}" * 100_000])
async def test_long_text_of_a_client_does_not_hide_the_error(fail, text):
    # gRPC throws away a status that is too long for its trailers.
    for error in (
        errors.InvalidFieldError(text, text, value=text),
        errors.NotFoundError("model", text),
        errors.PreconditionError("KIND", text, text),
        errors.AlreadyExistsError("request", text),
    ):
        seen, status = await fail(error)
        assert seen.code() is error.code
        assert details(status, error_details_pb2.ErrorInfo).reason == error.reason
        assert seen.details().endswith("\N{HORIZONTAL ELLIPSIS}") or len(seen.details()) < 1000


@given(st.text(st.characters(), max_size=2000))
def test_any_text_makes_a_status_within_the_limit(text):
    status = errors.InvalidFieldError("prompt", text, value=text).to_status()

    assert len(status.message.encode()) <= errors.MESSAGE_LIMIT_BYTES


def test_lone_surrogates_make_a_status():
    # Field case 7.
    assert errors.NotFoundError("model", "a\ud800b").to_status().message == "no model named 'a\\ud800b'"
    assert errors.MeshError("a\ud800b").to_status().message == "a?b"


def test_short_text_is_kept_as_it_is():
    error = errors.InvalidFieldError("prompt", "삼겹살 \N{PILE OF POO}")

    assert error.message == "prompt: 삼겹살 \N{PILE OF POO}"
    assert error.description == "삼겹살 \N{PILE OF POO}"
