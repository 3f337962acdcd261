"""The wire format of the socketpair between a worker and its engine: length, then message."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")


def encode_message(message: Message) -> bytes:
    """A message with its length in front."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


class MessageReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Takes what was read, and gives every message that is now complete."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[start + _LENGTH.size : end])
            start = end
        del buffer[:start]
