"""A build worker's side of builds: takes jobs, holds them while it works, says what became of them.

A job stays in the stream of its target and kind until its build has ended. The worker that runs it renews
its hold; the job of a worker that does not is taken by the next one.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from google.protobuf.message import DecodeError
from redis.exceptions import ResponseError

from enginemesh.internal.v1 import queue_pb2
from mesh.bus import build_scripts, keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.longrunning import operations_pb2
    from redis.asyncio import Redis

    from enginemesh.v1 import builds_pb2

KEEP_S = 7 * 24 * 3600
"""How long an ended build is shown, and a request id remembered."""

STATES_KEPT = 100
"""States of a running build in its log; a watcher that falls behind misses only what is outdated."""

CLAIM_IDLE_S = 10.0
"""A job whose worker was silent for this long is taken by another."""

FORGET_CONSUMER_S = 3600.0
"""A worker without a job that has not asked for one for so long is gone."""

log = structlog.get_logger(__name__)


def job_digest(spec: builds_pb2.ModelSpec, target_key: str) -> str:
    """What two jobs have in common that ask for the same."""
    return hashlib.sha256(
        spec.SerializeToString(deterministic=True) + b"\0" + target_key.encode()
    ).hexdigest()


def end_keys(build_id: str, spec: builds_pb2.ModelSpec, target_key: str) -> list[str]:
    """The keys that the end of a build touches: job stream, log, cancel, in flight."""
    return [
        keys.build_stream(target_key, spec.kind),
        keys.operation_log(build_id),
        keys.operation_cancel(build_id),
        keys.build_in_flight(job_digest(spec, target_key)),
    ]


class Hold(enum.IntEnum):
    """What has become of a worker's hold on a job; the values are those of the script."""

    LOST = 0
    HELD = 1
    CANCEL_ASKED = 2


@dataclass(frozen=True, slots=True)
class TakenBuild:
    """A job that a worker holds.

    Attributes:
        deliveries: How many workers had it, this one included.
    """

    entry_id: str
    job: queue_pb2.BuildJob
    deliveries: int = 1


class BuildConsumer:
    """A build worker's side.

    Args:
        redis: Connection; waiting occupies one of its pool.
        target_key: The worker's own hardware.
        kinds: Engine kinds that it can build.
        worker_id: Its name, also the name of its consumer.
        claim_idle_s: A job whose worker was silent for this long is taken.
    """

    def __init__(
        self,
        redis: Redis,
        target_key: str,
        kinds: Sequence[str],
        worker_id: str,
        claim_idle_s: float = CLAIM_IDLE_S,
    ) -> None:
        self._redis = redis
        self._streams = [keys.build_stream(target_key, kind) for kind in kinds]
        self._worker_id = worker_id
        self._claim_idle_ms = round(claim_idle_s * 1000)
        self._hold = redis.register_script(build_scripts.HOLD)
        self._finish = redis.register_script(build_scripts.FINISH)
        self._give_back = redis.register_script(build_scripts.GIVE_BACK)

    async def take(self, timeout_s: float) -> TakenBuild | None:
        """Takes a job that its worker left, or the next one, waiting for it if there is none."""
        try:
            return await self._claim() or await self._wait(timeout_s)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._open()
            return await self._wait(timeout_s)

    async def hold(self, taken: TakenBuild, operation: operations_pb2.Operation | None = None) -> Hold:
        """Renews the hold on a job, and writes a new state of its operation if one is given."""
        state = operation.SerializeToString() if operation else b""
        args: list[Any] = [keys.BUILD_GROUP, self._worker_id, taken.entry_id, state, STATES_KEPT]
        return Hold(await self._hold(keys=_keys(taken)[:3], args=args))

    async def finish(self, taken: TakenBuild, operation: operations_pb2.Operation) -> bool:
        """Writes the last state and removes the job; False, with nothing done, if another worker has it."""
        args: list[Any] = [keys.BUILD_GROUP, self._worker_id, taken.entry_id, taken.job.build_id]
        args += [operation.SerializeToString(), KEEP_S]
        return bool(await self._finish(keys=_keys(taken), args=args))

    async def give_back(self, taken: TakenBuild, operation: operations_pb2.Operation) -> bool:
        """Puts a job back into the queue, for another worker; False if another has it already."""
        args: list[Any] = [keys.BUILD_GROUP, self._worker_id, taken.entry_id, operation.SerializeToString()]
        return bool(await self._give_back(keys=_keys(taken)[:2], args=args))

    async def close(self) -> None:
        """Removes this worker's consumers, and those of workers that died without doing so.

        Not one that holds a job: that would be lost with it.
        """
        for stream in self._streams:
            try:
                consumers = await self._redis.xinfo_consumers(stream, keys.BUILD_GROUP)
            except ResponseError:  # no stream or no group: nothing to remove
                continue
            for consumer in consumers:
                is_gone = consumer["idle"] > FORGET_CONSUMER_S * 1000
                if not consumer["pending"] and (is_gone or consumer["name"] == self._worker_id.encode()):
                    await self._redis.xgroup_delconsumer(stream, keys.BUILD_GROUP, consumer["name"])

    async def _open(self) -> None:
        """Makes the groups. They start at 0: what waits already counts."""
        for stream in self._streams:
            try:
                await self._redis.xgroup_create(stream, keys.BUILD_GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def _claim(self) -> TakenBuild | None:
        for stream in self._streams:
            claimed: Any = await self._redis.xautoclaim(
                stream, keys.BUILD_GROUP, self._worker_id, self._claim_idle_ms, "0", count=1
            )
            for entry_id, fields in claimed[1]:
                pending: Any = await self._redis.xpending_range(
                    stream, keys.BUILD_GROUP, entry_id, entry_id, 1
                )
                return await self._parsed(stream, entry_id, fields, pending[0]["times_delivered"])
        return None

    async def _wait(self, timeout_s: float) -> TakenBuild | None:
        streams: dict[Any, Any] = dict.fromkeys(self._streams, ">")
        read: Any = await self._redis.xreadgroup(
            keys.BUILD_GROUP, self._worker_id, streams, count=1, block=max(1, round(timeout_s * 1000))
        )
        if not read:
            return None
        found = [
            (stream.decode(), entry_id, fields) for stream, entries in read for entry_id, fields in entries
        ]
        for stream, entry_id, fields in found[1:]:  # streams filled at the same moment: one job at a time
            log_key = keys.operation_log(fields.get(b"build", b"").decode())
            args: list[Any] = [keys.BUILD_GROUP, self._worker_id, entry_id, b""]
            await self._give_back(keys=[stream, log_key], args=args)
        stream, entry_id, fields = found[0]
        return await self._parsed(stream, entry_id, fields, deliveries=1)

    async def _parsed(
        self, stream: str, entry_id: bytes, fields: dict[bytes, bytes], deliveries: int
    ) -> TakenBuild | None:
        try:
            job = queue_pb2.BuildJob.FromString(fields[b"job"])
        except (DecodeError, KeyError) as error:
            log.warning("malformed build job dropped", entry=entry_id, error=str(error))
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xack(stream, keys.BUILD_GROUP, entry_id)
                pipe.xdel(stream, entry_id)
                await pipe.execute()
            return None
        return TakenBuild(entry_id.decode(), job, deliveries)


def _keys(taken: TakenBuild) -> list[str]:
    return end_keys(taken.job.build_id, taken.job.spec, taken.job.target.key)
