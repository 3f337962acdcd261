"""A gateway's side of builds: asks for them, watches, cancels, forgets.

What an operation has become is the last entry of its log, so whoever watches needs no other message.
"""

from __future__ import annotations

import math
import secrets
import time
from typing import TYPE_CHECKING, Any

from google.longrunning import operations_pb2

from enginemesh.internal.v1 import queue_pb2
from enginemesh.v1 import builds_pb2
from mesh import build_operation
from mesh.bus import build_scripts, keys
from mesh.bus.build_jobs import CLAIM_IDLE_S, KEEP_S, end_keys, job_digest
from mesh.bus.connection import BLOCK_LIMIT_S
from mesh.errors import BuildCancelledError, InvalidFieldError, NotFoundError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from redis.asyncio import Redis

    from enginemesh.v1 import targets_pb2


class BuildQueue:
    """A gateway's side."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._create = redis.register_script(build_scripts.CREATE)
        self._cancel = redis.register_script(build_scripts.CANCEL)
        self._delete = redis.register_script(build_scripts.DELETE)

    async def create(
        self,
        spec: builds_pb2.ModelSpec,
        target: targets_pb2.Target,
        request_id: str = "",
        trace_context: tuple[str, str] = ("", ""),
    ) -> operations_pb2.Operation:
        """Queues a build.

        A build of the same spec and target that has not ended is returned in its place, and so is what an
        earlier call with the same request id gave.

        Args:
            spec: What to build.
            target: For what.
            request_id: The client's name for this call; empty: none.
            trace_context: W3C traceparent and tracestate of the call.

        Raises:
            InvalidFieldError: the request id was used for another build.
        """
        build_id = secrets.token_hex(8)
        digest = job_digest(spec, target.key)
        metadata = builds_pb2.BuildMetadata(
            spec=spec, target=target, stage=builds_pb2.BUILD_STAGE_QUEUED, detail="waits for a build worker"
        )
        metadata.create_time.GetCurrentTime()
        job = queue_pb2.BuildJob(
            build_id=build_id,
            spec=spec,
            target=target,
            traceparent=trace_context[0],
            tracestate=trace_context[1],
        )
        answer: Any = await self._create(
            keys=[
                keys.build_request(request_id),
                keys.build_in_flight(digest),
                keys.BUILDS,
                keys.build_stream(target.key, spec.kind),
                keys.operation_log(build_id),
            ],
            args=[
                *(build_id, digest, int(bool(request_id)), KEEP_S, keys.OPERATION_LOG_PREFIX),
                job.SerializeToString(),
                build_operation.unfinished(build_id, metadata).SerializeToString(),
            ],
        )
        if answer[1].decode() != digest:
            raise InvalidFieldError("request_id", f"{request_id!r} was used for another build")
        return await self.get(answer[0].decode())

    async def get(self, build_id: str) -> operations_pb2.Operation:
        """The present state of a build; NotFoundError if there is none."""
        return (await self._last_state(build_id))[1]

    async def ids(self) -> list[str]:
        """Every build, newest first; some may just have expired."""
        members: Any = await self._redis.zrevrange(keys.BUILDS, 0, -1)
        return [member.decode() for member in members]

    async def states(self, build_ids: Sequence[str]) -> list[operations_pb2.Operation]:
        """The present states of these builds, in this order, without those that have expired."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for build_id in build_ids:
                pipe.xrevrange(keys.operation_log(build_id), count=1)
            logs = await pipe.execute()
        expired = [build_id for build_id, log in zip(build_ids, logs, strict=True) if not log]
        if expired:
            await self._redis.zrem(keys.BUILDS, *expired)
        return [_operation(log[0][1]) for log in logs if log]

    async def watch(self, build_id: str) -> AsyncIterator[operations_pb2.Operation]:
        """The present state of a build, then each new one, until it has ended; NotFoundError as in `get`."""
        entry_id, operation = await self._last_state(build_id)
        yield operation
        while not operation.done:
            entry_id, newer = await self._state_after(build_id, entry_id, BLOCK_LIMIT_S)
            if newer is not None:
                operation = newer
                yield operation

    async def wait(self, build_id: str, timeout_s: float = math.inf) -> operations_pb2.Operation:
        """The state of a build when it has ended, or after `timeout_s`; NotFoundError as in `get`."""
        deadline = time.monotonic() + timeout_s
        entry_id, operation = await self._last_state(build_id)
        while not operation.done and (remaining := deadline - time.monotonic()) > 0:
            entry_id, newer = await self._state_after(build_id, entry_id, min(remaining, BLOCK_LIMIT_S))
            operation = newer or operation
        return operation

    async def cancel(self, build_id: str) -> None:
        """Ends a build that waits, and asks the worker of one that runs to stop; an ended one stays as it is.

        Raises:
            NotFoundError: there is no such build.
        """
        operation = await self.get(build_id)
        metadata = build_operation.metadata_of(operation)
        status = BuildCancelledError("cancelled before it was begun").to_status()
        await self._cancel(
            keys=end_keys(build_id, metadata.spec, metadata.target.key),
            args=[
                *(keys.BUILD_GROUP, build_id),
                build_operation.failed(build_id, metadata, status).SerializeToString(),
                *(KEEP_S, round(CLAIM_IDLE_S * 1000)),
            ],
        )

    async def delete(self, build_id: str) -> None:
        """Forgets an ended build; its engine stays.

        Raises:
            NotFoundError: there is no such build.
            PreconditionError: it has not ended.
        """
        deleted = await self._delete(keys=[keys.operation_log(build_id), keys.BUILDS], args=[build_id])
        if deleted < 0:
            raise _not_found(build_id)
        if not deleted:
            name = f"{build_operation.COLLECTION}/{build_id}"
            raise PreconditionError("BUILD_RUNS", name, f"{name} has not ended: cancel it first")

    async def _last_state(self, build_id: str) -> tuple[bytes, operations_pb2.Operation]:
        log: Any = await self._redis.xrevrange(keys.operation_log(build_id), count=1)
        if not log:
            raise _not_found(build_id)
        return log[0][0], _operation(log[0][1])

    async def _state_after(
        self, build_id: str, entry_id: bytes, timeout_s: float
    ) -> tuple[bytes, operations_pb2.Operation | None]:
        """Waits for a state newer than `entry_id`; the newest counts."""
        block_ms = max(1, round(timeout_s * 1000))
        read: Any = await self._redis.xread({keys.operation_log(build_id): entry_id}, block=block_ms)
        if read:
            newest_id, fields = read[0][1][-1]
            return newest_id, _operation(fields)
        await self._last_state(build_id)  # deleted meanwhile, or lost with Redis's data?
        return entry_id, None


def _operation(fields: dict[bytes, bytes]) -> operations_pb2.Operation:
    return operations_pb2.Operation.FromString(fields[b"state"])


def _not_found(build_id: str) -> NotFoundError:
    return NotFoundError("operation", f"{build_operation.COLLECTION}/{build_id}")
