"""Requests that do not parse name the field at fault (field case 23)."""

import pytest

from enginemesh.v1 import inference_pb2
from gateway.malformed import Malformed, lenient

parse = lenient(inference_pb2.GenerateRequest)
BAD = b"\xff\xfe"


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (field(2, BAD), "prompt"),
        (field(1, b"m") + field(2, BAD), "prompt"),
        (field(3, field(1, field(1, b"user") + field(2, BAD))), "chat.messages.content"),
        (field(5, field(6, BAD)), "sampling.stop"),
        (b"\x0a\x05abc", "GenerateRequest"),
        (b"\x0b", "GenerateRequest"),
        (b"\xff" * 12, "GenerateRequest"),
    ],
)
def test_the_fault_is_named(data, path):
    assert isinstance(found := parse(data), Malformed)
    assert found.field == path


def test_a_good_message_is_parsed():
    message = inference_pb2.GenerateRequest(model="m", prompt="é")
    assert parse(message.SerializeToString()) == message
