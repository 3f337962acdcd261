"""The S3 store. Nothing else knows the `minio` client, nor mesh/range_reader.py, which reads objects.

All calls are synchronous and thread-safe; asyncio code makes them by `asyncio.to_thread`.
"""

from __future__ import annotations

import io
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3.exceptions import HTTPError, MaxRetryError

from mesh.errors import IntegrityError, MeshError, NotFoundError, PreconditionError, UnavailableError
from mesh.range_reader import RangeError, RangeReader, ShortObjectError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from pathlib import Path

    from mesh.settings import MeshSettings

PART_BYTES = 16 << 20
"""An object above this size is sent in parts of this size, three at a time."""

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 20.0
"""Longest silence within one answer."""

ATTEMPTS = 4
RETRY_AFTER_S = 2.0
URL_LIFETIME = timedelta(minutes=10)

_MISSING = {"NoSuchKey", "NoSuchBucket", "ResourceNotFound"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_OURS_ALREADY = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}
_RETRIED = (500, 502, 503, 504)
_OK, _CONFLICT, _PRECONDITION_FAILED = 200, 409, 412


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says of an object: size in bytes, and the UTC time when it was last written.

    The ETag tells versions of one object apart; it is no digest of the content.
    """

    key: str
    size: int
    etag: str
    last_modified: datetime


class ByteSource(Protocol):
    """What put_stream reads from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


class ObjectStore:
    """One bucket of an S3 server.

    Every method may raise UnavailableError if the server cannot be reached or does not answer after
    ATTEMPTS tries, and PreconditionError (STORE_ACCESS_DENIED) if it refuses the keys.
    """

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        access_key: str,
        secret_key: str,
        *,
        region: str = "us-east-1",
        secure: bool = False,
        read_timeout_s: float = READ_TIMEOUT_S,
        create_bucket: bool = True,
    ) -> None:
        self._retries = urllib3.Retry(
            total=ATTEMPTS - 1,
            backoff_factor=0.1,
            status_forcelist=_RETRIED,
            allowed_methods=None,  # all: those that we send may be repeated
            respect_retry_after_header=False,  # the server would set how long a call takes
        )
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=read_timeout_s)
        self._http = urllib3.PoolManager(maxsize=32, timeout=timeout, retries=self._retries)
        self._client = Minio(
            endpoint,
            access_key=access_key or None,
            secret_key=secret_key or None,
            secure=secure,
            region=region,
            http_client=self._http,
        )
        self._reader = RangeReader(CONNECT_TIMEOUT_S, read_timeout_s, ATTEMPTS)
        self._endpoint = endpoint
        self._bucket = bucket
        self._bucket_exists = not create_bucket

    @classmethod
    def from_settings(cls, settings: MeshSettings, *, create_bucket: bool = True) -> ObjectStore:
        """The store that the settings name. Connects on first use, and then makes the bucket if absent.

        Without `create_bucket` an absent bucket gives NotFoundError, as an absent object does.
        """
        return cls(
            settings.s3_endpoint,
            settings.s3_bucket,
            settings.s3_access_key.get_secret_value(),
            settings.s3_secret_key.get_secret_value(),
            region=settings.s3_region,
            secure=settings.s3_secure,
            create_bucket=create_bucket,
        )

    def put_bytes(self, key: str, data: bytes) -> None:
        """Stores bytes, replacing what was there."""
        self.put_stream(key, io.BytesIO(data), len(data))

    def put_stream(self, key: str, stream: ByteSource, size: int) -> None:
        """Stores the next `size` bytes of a stream, replacing what was there.

        The object appears whole, after the last byte was read. What `stream.read` raises passes through,
        and then nothing was stored.
        """
        with self._calling(key):
            self._client.put_object(self._bucket, key, stream, size, part_size=PART_BYTES)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Stores bytes if the key is free.

        Returns:
            Whether this call stored them. After an answer that was lost on the way, False may be said of
            bytes that this very call stored.
        """
        with self._calling(key):
            url = self._client.presigned_put_object(self._bucket, key, URL_LIFETIME)
            # put_object cannot send this header: as metadata it would become x-amz-meta-if-none-match.
            # A conflict is no verdict: it says that another such call runs at this moment.
            retries = self._retries.new(status_forcelist={*_RETRIED, _CONFLICT})
            headers = {"If-None-Match": "*"}
            status = self._http.urlopen("PUT", url, body=data, headers=headers, retries=retries).status
            if status not in {_OK, _PRECONDITION_FAILED}:
                raise ServerError("", status)
            return status == _OK

    def get_bytes(self, key: str, limit: int) -> bytes:
        """A whole object of at most `limit` bytes.

        Raises:
            NotFoundError: there is none.
            PreconditionError: it is larger (OBJECT_TOO_LARGE).
        """
        return self.get(key, limit)[1]

    def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Like get_bytes, with what the store says of the object."""
        info = self.stat(key)
        if info.size > limit:
            raise PreconditionError(
                "OBJECT_TOO_LARGE",
                key,
                f"object {key} has {info.size} bytes; the limit is {limit}",
                size=info.size,
                limit=limit,
            )
        data = bytearray(info.size)
        self.read_into(key, 0, memoryview(data))
        return info, bytes(data)

    def get_file(self, key: str, path: Path) -> None:
        """Writes a whole object to a file; the file is not whole if this raises."""
        info = self.stat(key)
        with path.open("wb") as file:
            self.read_range(key, 0, info.size, file.write, info.etag)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with the object's bytes from `offset` on; raises as read_range does."""
        filled = 0

        def fill(piece: memoryview) -> None:
            nonlocal filled
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)

        self.read_range(key, offset, len(buffer), fill)

    def read_range(
        self, key: str, offset: int, length: int, take: Callable[[memoryview], object], etag: str = ""
    ) -> None:
        """Hands the object's bytes from `offset` on to `take`, piece by piece, at little cost.

        A transfer that breaks off goes on where it stopped; ATTEMPTS tries in a row without a byte end it.

        Args:
            key: Of the object.
            offset: Of the first byte.
            length: How many bytes.
            take: Gets the pieces in order, each good until it returns; what it raises ends the read.
            etag: If set, the version of the object that it must be, as `stat` told it.

        Raises:
            NotFoundError: there is no such object.
            IntegrityError: the object ends too soon.
            UnavailableError: also if the object is no longer the version that was asked for.
        """
        with self._calling(key):
            self._reader.read(lambda: self.signed_url(key), offset, length, take, etag)

    def signed_url(self, key: str) -> str:
        """Where anybody may read the object for URL_LIFETIME; a secret, as it needs no keys."""
        return str(self._client.presigned_get_object(self._bucket, key, URL_LIFETIME))

    def stat(self, key: str) -> ObjectInfo:
        """What the store says of an object; NotFoundError if there is none."""
        with self._calling(key):
            return _info(self._client.stat_object(self._bucket, key))

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        with suppress(NotFoundError):
            return bool(self.stat(key))
        return False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose keys start with `prefix`, by key."""
        with self._calling(prefix):
            for entry in self._client.list_objects(self._bucket, prefix, recursive=True):
                yield _info(entry)

    def delete(self, key: str) -> None:
        """Removes an object; harmless if there is none."""
        with self._calling(key):
            self._client.remove_object(self._bucket, key)

    def abort_uploads(self, prefix: str, begun_before: datetime | None = None) -> None:
        """Removes the parts of uploads below a prefix that were begun and not ended, as by a killed process.

        One that still runs fails. Some servers (MinIO) want a whole key as prefix.
        """
        with self._calling(prefix):
            for upload in self._client._list_multipart_uploads(self._bucket, prefix=prefix).uploads:  # noqa: SLF001 - minio has no public way
                if begun_before and (not upload.initiated_time or upload.initiated_time > begun_before):
                    continue
                self._client._abort_multipart_upload(self._bucket, upload.object_name, upload.upload_id)  # noqa: SLF001 - as above

    @contextmanager
    def _calling(self, key: str) -> Iterator[None]:
        """Makes sure of the bucket, and turns what the client raises into errors of the mesh.

        Only parts of the client's messages are kept, and the cause is cut off: some hold signed URLs.
        """
        try:
            self._ensure_bucket()
            yield
        except (MinioException, HTTPError, RangeError, ShortObjectError) as error:
            raise self._translated(error, key) from None

    def _translated(self, error: Exception, key: str) -> MeshError:
        code = error.code if isinstance(error, (S3Error, RangeError)) else None
        if code in _MISSING:
            return NotFoundError("object", key)
        if code == "InvalidRange" or isinstance(error, ShortObjectError):
            return IntegrityError(f"object {key} is shorter than expected", key=key)
        if code in _DENIED:
            return PreconditionError(
                "STORE_ACCESS_DENIED",
                self._bucket,
                f"the store at {self._endpoint} refuses bucket {self._bucket!r} ({code}): check "
                "ENGINEMESH_S3_ACCESS_KEY, ENGINEMESH_S3_SECRET_KEY and ENGINEMESH_S3_BUCKET",
            )
        return UnavailableError(
            f"the store at {self._endpoint} (ENGINEMESH_S3_ENDPOINT) failed: {code or _what(error)}",
            RETRY_AFTER_S,
            endpoint=self._endpoint,
        )

    def _ensure_bucket(self) -> None:
        if self._bucket_exists:
            return
        try:
            if not self._client.bucket_exists(self._bucket):
                self._client.make_bucket(self._bucket)
        except S3Error as error:
            # Another process was quicker, or these keys may use the bucket but not look at it.
            if error.code not in _OURS_ALREADY | _DENIED:
                raise
        self._bucket_exists = True


def _what(error: Exception) -> str:
    if isinstance(error, RangeError):
        return str(error)
    if isinstance(error, MaxRetryError):
        return str(error.reason)
    if isinstance(error, ServerError):
        return f"HTTP status {error.status_code}"
    if isinstance(error, InvalidResponseError):
        return "it does not answer like an S3 server"
    return type(error).__name__


def _info(entry: Any) -> ObjectInfo:
    return ObjectInfo(entry.object_name, entry.size, entry.etag or "", entry.last_modified)
