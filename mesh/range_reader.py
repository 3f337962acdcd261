"""Reads parts of objects by plain HTTP ranges, each byte once into memory that is used again.

Only mesh/object_store.py uses it. It stands beside the `minio` client because of what a byte costs
(docs/cold-start.md has the figures): that client and others give every piece as new memory.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections import defaultdict, deque
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

PIECE_BYTES = 256 << 10
"""Small enough to be still in the processor's cache when it is written or hashed."""

ERROR_BYTES = 4096
RETRIED = (500, 502, 503, 504)
BACKOFF_S = 0.1

_CODE = re.compile(rb"<Code>(\w+)</Code>")


class RangeError(Exception):
    """The server did not give a range.

    Attributes:
        status: HTTP status of its last answer; 0 if there was none.
        code: What S3 calls the error; empty if it did not say.
    """

    def __init__(self, what: str, status: int = 0, code: str = "") -> None:
        super().__init__(what)
        self.status = status
        self.code = code


class ShortObjectError(Exception):
    """The object ends before the range does."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One server."""

    is_secure: bool
    netloc: str


class RangeReader:
    """Reads ranges, over connections that it keeps. Thread-safe.

    Args:
        connect_timeout_s: Longest time until a connection stands.
        read_timeout_s: Longest silence within one answer.
        attempts: Tries in a row without a byte that end a read.
    """

    def __init__(self, connect_timeout_s: float, read_timeout_s: float, attempts: int) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._attempts = attempts
        self._idle: dict[_Place, deque[_Connection]] = defaultdict(deque)
        self._tls: ssl.SSLContext | None = None

    def read(
        self,
        sign: Callable[[], str],
        offset: int,
        length: int,
        take: Callable[[memoryview], object],
        etag: str = "",
    ) -> None:
        """Hands the bytes from `offset` on to `take`, piece by piece; a piece is good until `take` returns.

        A transfer that breaks off goes on where it stopped. What `take` raises ends it and passes through.

        Args:
            sign: Gives a signed URL for GET; called for every try.
            offset: Of the first byte.
            length: How many; nothing is asked of the server for none.
            take: Gets the pieces in order.
            etag: If set, only this version of the object will do.

        Raises:
            RangeError: the server refused, or did not answer in several tries.
            ShortObjectError: the object ends too soon.
        """
        end = offset + length
        failures = 0
        while offset < end:
            before = offset
            try:
                with closing(self._pieces(sign(), offset, end - offset, etag)) as pieces:
                    for piece in pieces:
                        offset += len(piece)
                        take(piece)
                continue
            except RangeError as error:
                if error.status not in RETRIED:
                    raise
                last = error
            except _TransferError as error:
                last = RangeError(str(error))
            failures = 0 if offset > before else failures + 1
            if failures == self._attempts:
                raise last
            time.sleep(BACKOFF_S * failures)

    def _pieces(self, url: str, offset: int, length: int, etag: str) -> Generator[memoryview, None, None]:
        """One request, and what comes of it."""
        parts = urlsplit(url)
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        if etag:
            headers["If-Match"] = f'"{etag}"'
        with self._connection(_Place(parts.scheme == "https", parts.netloc)) as connection:
            with _transferring():
                response = connection.ask(f"{parts.path}?{parts.query}", headers)
            if int(response.headers.get("Content-Length", length)) != length:
                raise ShortObjectError
            while length:
                with _transferring():
                    piece = connection.buffer[: min(length, PIECE_BYTES)]
                    count = response.readinto(piece)
                    if not count:
                        raise http.client.IncompleteRead(b"", length)
                length -= count
                yield piece[:count]
            with _transferring():
                response.read()  # the end, after which the connection can be used again

    @contextmanager
    def _connection(self, place: _Place) -> Iterator[_Connection]:
        """A connection, kept for others if all went well."""
        idle = self._idle[place]
        try:
            connection = idle.pop()
        except IndexError:
            with _transferring():
                connection = self._connect(place)
        try:
            yield connection
        except BaseException:
            connection.close()
            with suppress(IndexError):
                while True:  # a server that ended one has often ended all
                    idle.pop().close()
            raise
        idle.append(connection)

    def _connect(self, place: _Place) -> _Connection:
        if place.is_secure and self._tls is None:
            self._tls = ssl.create_default_context()
        return _Connection(place, self._tls, self._connect_timeout_s, self._read_timeout_s)


class _Connection:
    """One connection and the memory that its pieces come in."""

    def __init__(
        self, place: _Place, tls: ssl.SSLContext | None, connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        if place.is_secure:
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                place.netloc, timeout=connect_timeout_s, context=tls
            )
        else:
            self._http = http.client.HTTPConnection(place.netloc, timeout=connect_timeout_s)
        self._http.connect()
        self._http.sock.settimeout(read_timeout_s)
        self._http.auto_open = 0  # a lost connection is ours to replace, with its timeouts
        self.buffer = memoryview(bytearray(PIECE_BYTES))

    def ask(self, target: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Sends a GET; raises RangeError unless the answer is the range."""
        self._http.request("GET", target, headers=headers)
        response = self._http.getresponse()
        if response.status not in {http.client.OK, http.client.PARTIAL_CONTENT}:
            code = _CODE.search(response.read(ERROR_BYTES))
            raise RangeError(
                f"HTTP status {response.status}", response.status, code[1].decode() if code else ""
            )
        return response

    def close(self) -> None:
        self._http.close()


class _TransferError(Exception):
    """The connection failed; the message says how, without the URL."""


@contextmanager
def _transferring() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _TransferError(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        ) from None
