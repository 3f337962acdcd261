"""The engine's end of the socketpair to its worker."""

from __future__ import annotations

import selectors
from typing import TYPE_CHECKING

from enginemesh.internal.v1 import engine_process_pb2
from infer_worker.child_messages import MessageReader, encode_message

if TYPE_CHECKING:
    import socket

READ_BYTES = 1 << 18
CONGESTED_BYTES = 1 << 20


class Pair:
    """Commands in, events out, never blocked by a worker that does not read.

    What the worker does not take is kept; an engine that heeds `is_congested` keeps little.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._reader = MessageReader()
        self._unsent = bytearray()
        self.is_open = True

    @property
    def is_congested(self) -> bool:
        """Whether so much is unsent that no more should be made."""
        return len(self._unsent) > CONGESTED_BYTES

    def receive(self, timeout_s: float | None) -> list[engine_process_pb2.EngineCommand]:
        """The commands that have come; waits `timeout_s` at most for one, or for what is unsent to leave.

        Empties what is unsent as far as it goes. Clears `is_open` when the worker is gone.
        """
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._connection, wanted)
        commands: list[engine_process_pb2.EngineCommand] = []
        for _, ready in self._selector.select(timeout_s):
            if ready & selectors.EVENT_WRITE:
                self._flush()
            if ready & selectors.EVENT_READ:
                commands = self._read()
        return commands

    def send(self, event: engine_process_pb2.EngineEvent) -> None:
        """Sends an event, or as much of it as goes now."""
        self._unsent += encode_message(event)
        self._flush()

    def drain(self) -> None:
        """Waits until all that is unsent has left, or the worker is gone."""
        while self._unsent and self.is_open:
            self.receive(None)

    def _read(self) -> list[engine_process_pb2.EngineCommand]:
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        self.is_open = self.is_open and bool(data)
        return [engine_process_pb2.EngineCommand.FromString(message) for message in self._reader.feed(data)]

    def _flush(self) -> None:
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            return
        except ConnectionError:
            self.is_open = False
            return
        del self._unsent[:sent]
