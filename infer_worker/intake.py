"""Takes requests from the queue as slots come free, begins each, and claims it from its gateway."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from google.protobuf.message import DecodeError

from enginemesh.internal.v1 import queue_pb2
from mesh import metrics
from mesh.bus.connection import BLOCK_LIMIT_S, UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infer_worker.link import Link
    from infer_worker.links import LinkSet
    from mesh.bus.leases import Leases
    from mesh.bus.requests import Entry, RequestConsumer

log = structlog.get_logger(__name__)

RETRY_DELAY_S = 0.1
ANSWER_LIMIT_S = 2.0
"""A claim that its gateway has not answered by then is dropped, and others of its requests are left alone
until it says something: a gateway that stands still must not hold slots that others could use."""

AT_ONCE_S = 0.002
"""A wait that gives an entry sooner than this found it in the queue, where there may be more."""

SETTLE_DELAY_S = 0.02
"""How long a settled entry waits for others to be removed with it. Its answer's first token is made in that
time, which removing it would only delay."""

Key = tuple[str, str, int]
"""Gateway's address, request id, attempt; ids are the clients' own, so two gateways may have the same."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that was taken and begun, and goes on if its gateway agrees.

    `since` is by the loop's clock in seconds.
    """

    entry: Entry
    key: Key
    gateway_id: str
    link: Link
    since: float


class Intake:
    """The loop take, begin, claim. The answers come in by `granted` and `refused`.

    A request runs while its gateway is asked: nearly all claims are granted, and the answer would come
    long before the first token. What is refused, or not answered in time, is stopped.

    Args:
        consumer: The queues.
        gateways: Leases of gateways: whether one that does not answer still exists.
        links: Ways to the gateways.
        free_slots: Sequences that the engine could start now. Told of the handles of claims without an
            answer: they hold their slots even if they have ended, lest a silent gateway empty the queue.
        begin: Starts a request; returns its handle on the link.
        stop: Stops what was begun under a handle, if it still runs.
        bite: Requests taken at once, at most.
        claim_interval_s: How often requests that others left unconfirmed are looked for.
    """

    def __init__(
        self,
        consumer: RequestConsumer,
        gateways: Leases,
        links: LinkSet,
        *,
        free_slots: Callable[[Iterable[int]], int],
        begin: Callable[[Link, Entry, queue_pb2.QueuedRequest], int],
        stop: Callable[[Link, int], None],
        bite: int,
        claim_interval_s: float,
    ) -> None:
        self._consumer = consumer
        self._gateways = gateways
        self._links = links
        self._free_slots = free_slots
        self._begin = begin
        self._stop = stop
        self._bite = bite
        self._claim_interval_s = claim_interval_s
        self._loop = asyncio.get_running_loop()
        self._claims: dict[int, Claim] = {}
        self._keys: set[Key] = set()
        self._next_claim_pass = 0.0
        self._is_queue_empty = False
        """Whether the last entry had to be waited for, so that waiting for the next is all there is to do."""
        self._settled: list[Entry] = []
        self._has_settled = asyncio.Event()
        self._slot_freed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Claims without an answer."""
        return len(self._claims)

    async def run(self) -> None:
        """Takes requests for ever; cancel it to stop taking."""
        is_open = is_unreachable = False
        while True:
            await self._wait_for_room()
            try:
                if not is_open:
                    await self._consumer.open()
                    is_open = True
                entries = await self._take()
            except UNREACHABLE as error:
                if not is_unreachable:
                    log.warning("queue unreachable; running requests go on", error=str(error))
                is_unreachable = True
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            if is_unreachable:
                log.info("queue reachable again")
            is_unreachable = False
            for entry in entries:
                await self._receive(entry)

    async def acknowledge(self) -> None:
        """Removes settled entries from the queue, for ever; those that settle meanwhile go together."""
        while True:
            await self._has_settled.wait()
            self._has_settled.clear()
            await asyncio.sleep(SETTLE_DELAY_S)
            while self._settled:
                entries = list(self._settled)
                try:
                    await self._consumer.acknowledge(entries)
                except UNREACHABLE:
                    # Whoever takes them again meanwhile is refused by the gateway and acknowledges them.
                    await asyncio.sleep(RETRY_DELAY_S)
                else:
                    del self._settled[: len(entries)]

    async def watch(self) -> None:
        """Drops claims that were not answered in time, for ever."""
        while True:
            await asyncio.sleep(ANSWER_LIMIT_S / 4)
            limit = self._loop.time() - ANSWER_LIMIT_S
            late = [handle for handle, claim in self._claims.items() if claim.since < limit]
            if late:
                log.warning("gateways do not answer claims", claims=len(late))
                self._drop(late)

    def slot_freed(self) -> None:
        """A sequence ended: there may be room for another."""
        self._slot_freed.set()

    def granted(self, handle: int) -> bool:
        """A gateway wants this attempt to run: its entry is acknowledged soon. False if it was dropped."""
        claim = self._remove(handle)
        if claim is not None:
            self._settle(claim.entry)
        return claim is not None

    def refused(self, handle: int) -> None:
        """A gateway does not want this attempt to run: it has ended, or runs elsewhere."""
        claim = self._remove(handle)
        if claim is not None:
            self._settle(claim.entry)
            self._stop(claim.link, handle)
        self.slot_freed()

    def link_lost(self, link: Link) -> None:
        """Drops what was claimed over a lost link.

        It stays in the queue for whoever takes it next, unless its gateway exists no more: then nobody
        waits for it.
        """
        lost = {handle: claim for handle, claim in self._claims.items() if claim.link is link}
        self._drop(lost)
        if lost and not link.gateway_id:
            task = asyncio.ensure_future(self._settle_if_gone(list(lost.values())))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Leaves the queue: what is settled goes, what is not goes back to others."""
        try:
            await self._consumer.acknowledge(self._settled)
            await self._consumer.close()
        except UNREACHABLE as error:
            log.warning("entries are left for others to claim", error=str(error))

    async def wait_for_freed_slot(self) -> None:
        """Returns when the next sequence or claim has ended; for one waiter at a time."""
        self._slot_freed.clear()
        await self._slot_freed.wait()

    async def _wait_for_room(self) -> None:
        while self._room() <= 0:
            await self.wait_for_freed_slot()

    def _room(self) -> int:
        return self._free_slots(self._claims)

    async def _take(self) -> list[Entry]:
        now = self._loop.time()
        is_claim_pass = now >= self._next_claim_pass
        if is_claim_pass:
            self._next_claim_pass = now + self._claim_interval_s
        if is_claim_pass or not self._is_queue_empty:
            entries = await self._consumer.take(min(self._room(), self._bite), claim=is_claim_pass)
            if entries:
                return entries
        began = self._loop.time()
        patience_s = min(BLOCK_LIMIT_S, self._next_claim_pass - began)
        entries = await self._consumer.wait(patience_s) if patience_s > 0 else []
        self._is_queue_empty = self._loop.time() - began > AT_ONCE_S
        return entries

    async def _receive(self, entry: Entry) -> None:
        request = _parse(entry)
        if request is None:
            log.error("entry is no request and is dropped", stream=entry.stream, entry=entry.entry_id)
            metrics.ENTRIES_UNREADABLE.add(1)
            self._settle(entry)
            return
        key = (request.gateway_address, request.request_id, request.attempt)
        if key in self._keys:
            return  # taken again by this worker itself while it waits for the answer
        if self._room() <= 0:
            await self._put_back(entry)
            return
        link = self._links.get(request.gateway_address)
        if link is None or self._is_standing_still(link):
            return  # it stays unconfirmed, and a later pass finds it
        handle = self._begin(link, entry, request)
        self._claims[handle] = Claim(entry, key, request.gateway_id, link, self._loop.time())
        self._keys.add(key)
        link.outbox.claim(request.request_id, request.attempt, handle)

    async def _put_back(self, entry: Entry) -> None:
        try:
            await self._consumer.put_back(entry)
        except UNREACHABLE:
            log.warning("entry is left for others to claim", stream=entry.stream, entry=entry.entry_id)

    def _is_standing_still(self, link: Link) -> bool:
        """Whether a gateway let a claim expire and has said nothing since."""
        return link.unanswered_since > link.last_heard

    def _drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            claim = self._remove(handle)
            if claim is not None:
                claim.link.unanswered_since = self._loop.time()
                self._stop(claim.link, handle)
        self.slot_freed()

    def _remove(self, handle: int) -> Claim | None:
        claim = self._claims.pop(handle, None)
        if claim is not None:
            self._keys.discard(claim.key)
        return claim

    async def _settle_if_gone(self, claims: list[Claim]) -> None:
        try:
            live = await self._gateways.live()
        except UNREACHABLE:
            return
        for claim in claims:
            if claim.gateway_id not in live:
                log.info("request of a gateway that is gone", request=claim.key[1])
                self._settle(claim.entry)

    def _settle(self, entry: Entry) -> None:
        self._settled.append(entry)
        self._has_settled.set()


def _parse(entry: Entry) -> queue_pb2.QueuedRequest | None:
    try:
        request = queue_pb2.QueuedRequest.FromString(entry.payload)
    except DecodeError:
        return None
    return request if request.request_id and request.gateway_address else None
