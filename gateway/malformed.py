"""Requests that cannot be parsed: finds the field at fault, so that the client is told more than "internal".

A gRPC library answers INTERNAL when a message does not deserialise. Here such a message becomes a value
that the error interceptor turns into INVALID_ARGUMENT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands for a request that could not be parsed."""

    field: str
    problem: str


def lenient(message_type: type[Message]) -> Callable[[bytes], Any]:
    """A deserialiser of `message_type` that returns Malformed where the generated one would raise."""

    def deserialize(data: bytes) -> Message | Malformed:
        try:
            return message_type.FromString(data)
        except DecodeError:
            return Malformed(*find_fault(data, message_type.DESCRIPTOR))

    return deserialize


def find_fault(data: bytes, descriptor: Any, prefix: str = "") -> tuple[str, str]:
    """The first field that breaks the wire format, and how; by its path, such as "chat.messages.content"."""
    try:
        for number, value in _fields(data):
            field = descriptor.fields_by_number.get(number)
            if field is None or not isinstance(value, bytes):
                continue
            path = prefix + field.name
            if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
                return path, "is not valid UTF-8"
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                inner = find_fault(value, field.message_type, f"{path}.")
                if inner[0]:
                    return inner
    except (IndexError, ValueError):
        return prefix.rstrip(".") or descriptor.name, "is not a valid protobuf message"
    return ("", "") if prefix else (descriptor.name, "is not a valid protobuf message")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and raw values (https://protobuf.dev/programming-guides/encoding/)."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire_type == _LENGTH_DELIMITED:
            size, position = _varint(data, position)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + size > len(data):
            raise ValueError("truncated")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            return value, position
        shift += 7


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
