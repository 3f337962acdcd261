"""The log of one build: what its stages and tools said, within a limit."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

HEAD_SHARE = 4
"""The first quarter of what is kept is from the beginning; the rest is from the end."""

LINE_LIMIT_BYTES = 8192
HIDDEN = b"***"


class BuildLog:
    """Lines of text of which the first and the last are kept.

    Args:
        limit_bytes: Of what is kept; one line more says what is left out.
        secrets: Texts that never get into it, such as keys that a tool may print.
        earlier: The log of the attempts before.
    """

    def __init__(self, limit_bytes: int, secrets: Iterable[str] = (), earlier: str = "") -> None:
        self._head_limit = limit_bytes // HEAD_SHARE
        self._tail_limit = limit_bytes - self._head_limit
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0
        self._unfinished = b""
        self.has_changed = False
        for line in earlier.encode().splitlines(keepends=True):
            self._append(line)
        self.has_changed = False

    def say(self, text: str) -> None:
        """Adds a line of the build worker's own, with the time."""
        self.end_line()
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        line = text.replace("\n", " ")
        self._append(self._cleaned(f"{now} {line}".encode()))

    def write(self, data: bytes) -> None:
        """Adds what a tool wrote. Of a line that it drew several times, as it does a bar, the last counts."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            self._append(self._cleaned(line))
        if len(self._unfinished) > LINE_LIMIT_BYTES:
            drawn_again = self._unfinished.rfind(b"\r")
            if drawn_again >= 0:
                self._unfinished = self._unfinished[drawn_again + 1 :]
            else:
                self.end_line()

    def end_line(self) -> None:
        """What a tool wrote last is a line, though it did not end it."""
        if self._unfinished:
            self._append(self._cleaned(self._unfinished))
            self._unfinished = b""

    def to_bytes(self) -> bytes:
        """The whole log in UTF-8."""
        left_out = f"... {self._left_out} bytes left out ...\n".encode() if self._left_out else b""
        return bytes(self._head) + left_out + bytes(self._tail)

    def _cleaned(self, line: bytes) -> bytes:
        line = line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_LIMIT_BYTES]
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        return line.decode(errors="replace").encode() + b"\n"

    def _append(self, text: bytes) -> None:
        self.has_changed = True
        room = self._head_limit - len(self._head)
        if not self._tail and len(text) <= room:
            self._head += text
            return
        self._tail += text
        if len(self._tail) > self._tail_limit:
            cut = len(self._tail) - self._tail_limit
            end_of_line = self._tail.find(b"\n", cut)
            cut = end_of_line + 1 if end_of_line >= 0 else cut
            del self._tail[:cut]
            self._left_out += cut
