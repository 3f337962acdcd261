"""A TCP proxy in front of a real server, with the faults that networks have."""

from __future__ import annotations

import contextlib
import socket
import threading

CHUNK_BYTES = 64 << 10


class FaultyProxy:
    """Passes connections on to a port of this host until it is told to do worse.

    Attributes:
        port: Where clients connect.
        refuses: While set, connections are closed before they bring anything.
        refused: Connections that were.
        cut_after: If set, a connection is cut once it has brought this many bytes to the client.
        cuts_left: How many connections are cut so; then all pass.
        is_stalled: While set, answers are held back.
        stall_at: If set, a stall begins with the first request that has these bytes in it.
        stall_after: If set, answers stall once so many bytes were sent to clients.
        bytes_sent: Sent to clients so far.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.refuses = False
        self.refused = 0
        self.cut_after: int | None = None
        self.cuts_left = 0
        self.is_stalled = False
        self.stall_after: int | None = None
        self.stall_at: bytes | None = None
        self.bytes_sent = 0
        self._sockets: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def go_on(self) -> None:
        """Ends a stall."""
        with self._changed:
            self.is_stalled = False
            self._changed.notify_all()

    def wait_for_connections(self, count: int) -> None:
        """Returns once so many clients are connected; fails after 30 s."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._sockets) >= 2 * count, 30)

    def cut_all(self) -> None:
        """Ends every connection that there is."""
        for each in list(self._sockets):
            _cut(each)

    def close(self) -> None:
        """Ends every connection, and takes no more."""
        self._is_closed = True
        self.go_on()
        _cut(self._listener)
        self.cut_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                if self.refuses:
                    self.refused += 1
                    _cut(client)
                    continue
                server = socket.create_connection(("127.0.0.1", self._target_port))
                with self._changed:
                    self._sockets |= {client, server}
                    self._changed.notify_all()
                threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                if is_answer:
                    if self.stall_after is not None and self.bytes_sent >= self.stall_after:
                        self.stall_after, self.is_stalled = None, True
                    self._wait_out_stall()
                    if self.cut_after is not None and sent + len(data) > self.cut_after and self.cuts_left:
                        self.cuts_left -= 1
                        sink.sendall(data[: self.cut_after - sent])
                        break
                    self.bytes_sent += len(data)
                elif self.stall_at is not None and self.stall_at in data:
                    self.stall_at = None
                    self.is_stalled = True
                sink.sendall(data)
                sent += len(data)
        _cut(source)
        _cut(sink)
        self._sockets -= {source, sink}

    def _wait_out_stall(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_stalled)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
