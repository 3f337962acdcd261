"""The request queues of one model: gateways add entries, workers take them when they have room.

An entry stays until a worker has had it confirmed by its gateway and acknowledges it; acknowledging
deletes it. Unconfirmed entries of a worker that went away are claimed by others after a short idle time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from mesh.bus import keys, scripts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from redis.asyncio import Redis


@dataclass(frozen=True, slots=True)
class Entry:
    """A place in a stream, with the serialised QueuedRequest that stands there."""

    stream: str
    entry_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a gateway's request waits, so that it can be withdrawn."""

    stream: str
    entry_id: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for a worker: how many requests, and for how long the oldest has; 0 if there is none."""

    requests: int
    oldest_s: float


class RequestProducer:
    """A gateway's side of the queues of all models."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._is_present = redis.register_script(scripts.IS_PRESENT)
        self._waiting = redis.register_script(scripts.WAITING)
        self._remove = redis.register_script(scripts.REMOVE)

    async def add(self, stream: str, payload: bytes, ttl_s: float) -> Ticket:
        """Appends a serialised QueuedRequest that is worthless after `ttl_s` seconds."""
        fields: dict[Any, Any] = {"request": payload, "ttl_ms": max(1, round(ttl_s * 1000))}
        entry_id: Any = await self._redis.xadd(stream, fields)
        return Ticket(stream, entry_id.decode())

    async def withdraw(self, ticket: Ticket) -> None:
        """Removes a request that is no longer wanted; harmless if a worker has it already."""
        await self._remove(keys=[ticket.stream], args=[keys.REQUEST_GROUP, ticket.entry_id])

    async def present(self, tickets: Sequence[Ticket]) -> list[bool]:
        """For each ticket, whether its entry is still in its stream."""
        if not tickets:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for ticket in tickets:
                await self._is_present(keys=[ticket.stream], args=[ticket.entry_id], client=pipe)
            return [bool(found) for found in await pipe.execute()]

    async def depth(self, model: str, engines: Iterable[str] = ()) -> int:
        """Entries of a model that no worker has started, its engines' own streams included."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for stream in _streams(model, engines):
                pipe.xlen(stream)
            return sum(await pipe.execute())

    async def waiting(self, model: str, engines: Iterable[str]) -> Waiting:
        """What waits in the queues of a model and of its engines.

        An entry that was moved counts from its move.
        """
        count, oldest_ms = await self._waiting(keys=_streams(model, engines))
        return Waiting(count, oldest_ms / 1000)


class RequestConsumer:
    """One worker's side of the queues of its model.

    Args:
        redis: Connection; blocking reads occupy one of its pool.
        model: Model that the worker serves.
        engine: Digest of its engine.
        worker_id: Its name, also the name of its consumer.
        claim_idle_s: An unconfirmed entry of another worker is claimed after this many seconds.
    """

    def __init__(self, redis: Redis, model: str, engine: str, worker_id: str, claim_idle_s: float) -> None:
        self._redis = redis
        self._worker_id = worker_id
        self._claim_idle_ms = round(claim_idle_s * 1000)
        self._streams = [
            stream
            for priority in keys.PRIORITIES
            for stream in (keys.engine_stream(model, engine, priority), keys.model_stream(model, priority))
        ]
        """In the order of taking."""
        self._take = redis.register_script(scripts.TAKE)
        self._put_back = redis.register_script(scripts.PUT_BACK)
        self._close = redis.register_script(scripts.CLOSE_CONSUMER)
        self._remove = redis.register_script(scripts.REMOVE)

    async def open(self) -> None:
        """Makes streams and groups where they are missing. Groups start at 0: what waits already counts."""
        for stream in self._streams:
            try:
                await self._redis.xgroup_create(stream, keys.REQUEST_GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def take(self, wanted: int, *, claim: bool) -> list[Entry]:
        """Takes at most `wanted` entries without waiting.

        With `claim`, also those that were left unconfirmed: by others, or by this worker itself (as when
        the answer to an earlier take was lost), so it must know those that it still holds.
        """
        args: list[Any] = [keys.REQUEST_GROUP, self._worker_id, wanted, self._claim_idle_ms if claim else 0]
        taken = await self._recreating_groups(lambda: self._take(keys=self._streams, args=args))
        return [Entry(self._streams[index], entry_id.decode(), payload) for index, entry_id, payload in taken]

    async def wait(self, timeout_s: float) -> list[Entry]:
        """Waits until an entry comes, and takes it.

        More than one may come if several streams were filled at the same moment.
        """
        streams: dict[Any, Any] = dict.fromkeys(self._streams, ">")
        read = await self._recreating_groups(
            lambda: self._redis.xreadgroup(
                keys.REQUEST_GROUP, self._worker_id, streams, count=1, block=max(1, round(timeout_s * 1000))
            )
        )
        return [
            Entry(stream.decode(), entry_id.decode(), fields[b"request"])
            for stream, entries in read or []
            for entry_id, fields in entries
        ]

    async def acknowledge(self, entries: Sequence[Entry]) -> None:
        """Removes entries that were confirmed or refused; harmless to repeat."""
        streams = [entry.stream for entry in entries]
        ids = [entry.entry_id for entry in entries]
        if entries:
            await self._remove(keys=streams, args=[keys.REQUEST_GROUP, *ids])

    async def put_back(self, entry: Entry) -> None:
        """Gives an entry back for another worker to take, behind those that wait; its deadline stays."""
        await self._put_back(keys=[entry.stream], args=[keys.REQUEST_GROUP, entry.entry_id])

    async def close(self) -> None:
        """Gives back what this worker holds and removes its consumers."""
        for stream in self._streams:
            await self._close(keys=[stream], args=[keys.REQUEST_GROUP, self._worker_id])

    async def _recreating_groups(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Runs `call`; if Redis lost its data in between, makes the groups again and runs it once more."""
        try:
            return await call()
        except ResponseError as error:
            # Redis 7 tells one who waits UNBLOCKED when the stream goes, Valkey NOGROUP.
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            await self.open()
            return await call()


def _streams(model: str, engines: Iterable[str]) -> list[str]:
    streams = [keys.model_stream(model, priority) for priority in keys.PRIORITIES]
    return streams + [keys.engine_stream(model, engine, p) for engine in engines for p in keys.PRIORITIES]
