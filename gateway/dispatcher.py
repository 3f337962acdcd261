"""Carries out what the request table decides: queue entries in Redis, cancels on links, moves, deadlines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from gateway import request_trace
from gateway.session import State
from mesh import metrics, semconv
from mesh.bus import keys
from mesh.bus.connection import UNREACHABLE
from mesh.errors import DeadlineError, ExhaustedError, MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from gateway.request_table import LinkSessions, RequestTable
    from gateway.session import Session
    from gateway.waiting_room import WaitingRoom
    from mesh.bus.requests import RequestProducer

log = structlog.get_logger(__name__)

RETRY_DELAY_S = 0.1
AUDIT_INTERVAL_S = 1.0


class Dispatcher:
    """Sends requests on their way and takes back what they leave.

    Args:
        table: The protocol's state.
        room: Where requests wait before they go to Redis.
        producer: The queues.
        gateway_id: This process.
        gateway_address: Where workers reach this process, "host:port".
    """

    def __init__(
        self,
        table: RequestTable,
        room: WaitingRoom,
        producer: RequestProducer,
        gateway_id: str,
        gateway_address: str,
    ) -> None:
        self.table = table
        self.room = room
        self._producer = producer
        self._gateway_id = gateway_id
        self._gateway_address = gateway_address
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[Session, asyncio.TimerHandle] = {}
        self._deadlines: dict[Session, float] = {}
        self._is_unreachable = False
        self._patience: dict[Session, asyncio.TimerHandle] = {}
        self.cancel_on_link: Callable[[LinkSessions, int], None] = lambda _link, _handle: None

    async def submit(self, session: Session, timeout_s: float) -> None:
        """Enters a request and queues it. Returns once it is queued, or will be when Redis is back.

        Args:
            session: The request.
            timeout_s: Seconds until its deadline.

        Raises:
            AlreadyExistsError: a request of this name is in flight.
        """
        self.table.add(session)
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._deadlines[session] = now + timeout_s
        self._timers[session] = loop.call_later(timeout_s, self._expire, session)
        if session.max_waiting_s:
            self._patience[session] = loop.call_later(session.max_waiting_s, self._give_up, session)
        self._begin_wait(session, now)
        self.room.enter(session, now)
        for released in self.room.next_for_redis(session.model, now):
            if released is session:
                await self._enqueue(session)
            else:
                self._spawn(self._enqueue(released))

    def end(self, session: Session) -> None:
        """Takes back everything that a request has anywhere. Harmless to repeat; never waits.

        The handler of a cancelled call runs this while it is being cancelled, so what must wait is left
        to a task of the dispatcher's own.
        """
        leftover = self.table.end(session)
        if timer := self._timers.pop(session, None):
            timer.cancel()
            del self._deadlines[session]
            self.room.end(session)
            self._fill_window(session.model)
        request_trace.end_wait(session)
        self._stop_patience(session)
        if leftover.link is not None:
            self.cancel_on_link(leftover.link, leftover.handle)
        if leftover.ticket is not None:
            self._spawn(self._producer.withdraw(leftover.ticket))

    def claimed(self, session: Session) -> None:
        """A worker may run the request: its wait is over."""
        now = asyncio.get_running_loop().time()
        session.timeline.queue_total += now - session.timeline.queued
        request_trace.end_wait(session)
        self._stop_patience(session)
        self.room.claimed(session, now)
        self._fill_window(session.model)

    def move(self, sessions: Iterable[Session]) -> None:
        """Queues requests again that lost their worker; they are QUEUED for their next attempt already."""
        for session in sessions:
            log.info("request moves", request=session.request_id, attempt=session.attempt)
            metrics.REQUESTS_MOVED.add(1, {semconv.REQUEST_MODEL: session.model})
            self._begin_wait(session, asyncio.get_running_loop().time())
            self._spawn(self._enqueue(session))

    def redirect(self, session: Session, engine: str) -> None:
        """Queues a request for one engine, after a worker whose engine cannot run it took its entry."""
        session.engine = engine
        session.ticket = None
        self._spawn(self._enqueue(session))

    async def audit(self) -> None:
        """Queues again, for ever, what Redis lost: requests that no worker claimed and no stream holds.

        Tells how many wait and for how long, too.
        """
        while True:
            await asyncio.sleep(AUDIT_INTERVAL_S)
            now = asyncio.get_running_loop().time()
            for model, (requests, _) in self.room.depth().items():
                attributes = {semconv.REQUEST_MODEL: model}
                metrics.QUEUE_DEPTH.set(requests, attributes)
                metrics.QUEUE_OLDEST_WAIT.set(self.room.oldest_s(model, now), attributes)
            waiting = [session for session in self.table.queued() if session.ticket is not None]
            try:
                tickets = [session.ticket for session in waiting if session.ticket is not None]
                present = await self._producer.present(tickets)
            except UNREACHABLE:
                continue
            for session, is_present, ticket in zip(waiting, present, tickets, strict=True):
                if not is_present and session.state is State.QUEUED and session.ticket is ticket:
                    # Redis lost it, or a worker gave it back under another id; either way this is harmless.
                    log.debug("entry is not where it was", request=session.request_id)
                    await self._enqueue(session)

    async def close(self) -> None:
        """Waits for what was still to be taken back."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)

    async def _enqueue(self, session: Session) -> None:
        try:
            await self._add_to_queue(session)
        except Exception as error:  # whatever it is, the request must not wait for its deadline
            log.exception("request not queued", request=session.request_id)
            session.fail(MeshError(f"the request could not be queued: {type(error).__name__}"))

    async def _add_to_queue(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        attempt = session.attempt
        payload = session.queued_request(self._gateway_id, self._gateway_address).SerializeToString()
        while self._is_waiting(session, attempt):
            ttl_s = self._deadlines[session] - loop.time()
            try:
                ticket = await self._producer.add(_stream(session), payload, ttl_s)
            except UNREACHABLE as error:
                # Running streams live on without Redis, and one that has to be queued waits for it until
                # its deadline.
                if not self._is_unreachable:
                    log.warning("queue unreachable; running streams go on", error=str(error))
                self._is_unreachable = True
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            self._is_unreachable = False
            if self._is_waiting(session, attempt):
                session.ticket = ticket
            elif session.state is State.ENDED or session.error is not None:
                # It ended while its entry was on the way. (A worker may also have been quicker than
                # Redis's answer; then it owns the entry.)
                await self._producer.withdraw(ticket)
            return

    def _fill_window(self, model: str) -> None:
        for session in self.room.next_for_redis(model, asyncio.get_running_loop().time()):
            self._spawn(self._enqueue(session))

    def _begin_wait(self, session: Session, now: float) -> None:
        session.timeline.queued = now
        request_trace.begin_wait(session, _stream(session))

    def _is_waiting(self, session: Session, attempt: int) -> bool:
        return session.state is State.QUEUED and session.attempt == attempt and session.error is None

    def _expire(self, session: Session) -> None:
        where = "in the queue" if session.state is State.QUEUED else "while it ran"
        session.fail(DeadlineError(f"the deadline passed {where}", where=session.state.value))

    def _give_up(self, session: Session) -> None:
        limit = session.max_waiting_s
        session.fail(
            ExhaustedError(
                f"serving.max_waiting_s: no worker took the request within {limit:g} s",
                retry_after_s=limit,
                limit="serving.max_waiting_s",
                allowed=limit,
            )
        )

    def _stop_patience(self, session: Session) -> None:
        """It waits no more, or its model's limit on a first wait no longer counts."""
        if timer := self._patience.pop(session, None):
            timer.cancel()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", error=repr(error))


def _stream(session: Session) -> str:
    """Where a request waits. One that was moved goes before those that have not begun."""
    priority = "high" if session.attempt > 1 else session.priority
    if session.engine:
        return keys.engine_stream(session.model, session.engine, priority)
    return keys.model_stream(session.model, priority)
