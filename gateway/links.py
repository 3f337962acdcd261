"""The gateway's end of the links: one gRPC stream per worker, frames up, grants and cancels down."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import structlog

from enginemesh.internal.v1 import link_pb2, link_pb2_grpc, step_pb2
from gateway.request_table import LinkSessions
from mesh import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.dispatcher import Dispatcher
    from gateway.session import Session

log = structlog.get_logger(__name__)

HELLO_LIMIT_S = 5.0


class Link:
    """One worker's stream. What goes down is gathered and leaves as one message."""

    def __init__(self, hello: link_pb2.Hello, now: float) -> None:
        self.sessions = LinkSessions(worker_id=hello.worker_id, engine=hello.engine)
        self.last_heard = now
        self.is_silent = False
        self._outgoing = link_pb2.GatewayMessage()
        self._has_outgoing = asyncio.Event()

    def grant(self, handle: int) -> None:
        """The worker may run this attempt."""
        self._outgoing.grants.append(handle)
        self._has_outgoing.set()

    def refuse(self, handle: int) -> None:
        """The worker must drop this attempt."""
        self._outgoing.refusals.append(handle)
        self._has_outgoing.set()

    def cancel(self, handle: int) -> None:
        """The worker must stop this sequence."""
        self._outgoing.cancels.append(handle)
        self._has_outgoing.set()

    def ask_again(self, session: Session) -> None:
        """Tokens of a request are missing."""
        offset = len(session.token_ids) - session.attempt_base
        self._outgoing.resends.add(handle=session.handle, offset=offset)
        self._has_outgoing.set()

    async def outgoing(self) -> AsyncIterator[link_pb2.GatewayMessage]:
        """What to send, for ever."""
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            message, self._outgoing = self._outgoing, link_pb2.GatewayMessage()
            yield message


class LinksServicer(link_pb2_grpc.LinksServicer):
    """Serves links and watches that none falls silent.

    Args:
        dispatcher: Moves the requests of a lost link.
        gateway_id: This process.
        heartbeat_interval_s: Longest silence that a worker is asked to keep.
        silence_limit_s: A link that is silent for this long is taken for dead.
    """

    def __init__(
        self, dispatcher: Dispatcher, gateway_id: str, heartbeat_interval_s: float, silence_limit_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._table = dispatcher.table
        self._gateway_id = gateway_id
        self._heartbeat_interval_ms = round(heartbeat_interval_s * 1000)
        self._silence_limit_s = silence_limit_s
        self._links: dict[LinkSessions, tuple[Link, asyncio.Task[None]]] = {}
        dispatcher.cancel_on_link = self._cancel
        self.is_fit: Callable[[Session, str], bool] = lambda _session, _engine: False
        """Whether an engine that a request does not know of can run it."""

    async def Connect(  # type: ignore[override]  # it writes to the context; the stub knows iterators only
        self,
        request_iterator: AsyncIterator[link_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[link_pb2.WorkerMessage, link_pb2.GatewayMessage],
    ) -> None:
        """Runs one link until either end closes it or it falls silent."""
        loop = asyncio.get_running_loop()
        try:
            first = await asyncio.wait_for(anext(aiter(request_iterator), None), HELLO_LIMIT_S)
        except asyncio.TimeoutError:
            first = None
        if first is None or not first.HasField("hello"):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "hello: must be the first message of a link"
            )
        link = Link(first.hello, loop.time())
        reading = asyncio.ensure_future(self._read(link, request_iterator))
        self._links[link.sessions] = (link, reading)
        metrics.LINKS_ACTIVE.add(1)
        log.info("link up", worker=link.sessions.worker_id)
        writing = asyncio.ensure_future(self._write(link, context))
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and (error := task.exception()):
                    log.error("link failed", worker=link.sessions.worker_id, exc_info=error)
        finally:
            for task in (reading, writing):
                task.cancel()
            del self._links[link.sessions]
            metrics.LINKS_ACTIVE.add(-1)
            self._lose(link)

    async def watch(self) -> None:
        """Drops links that fall silent, for ever."""
        loop = asyncio.get_running_loop()
        interval = self._silence_limit_s / 6
        while True:
            before = loop.time()
            await asyncio.sleep(interval)
            now = loop.time()
            if now - before > 2 * interval:
                # This process itself was held up: what workers sent meanwhile is still unread, so their
                # silence says nothing.
                for link, _ in self._links.values():
                    link.last_heard = now
                continue
            for link, reading in list(self._links.values()):
                if now - link.last_heard > self._silence_limit_s:
                    link.is_silent = True
                    self._lose(link)
                    reading.cancel()

    async def _read(self, link: Link, messages: AsyncIterator[link_pb2.WorkerMessage]) -> None:
        loop = asyncio.get_running_loop()
        async for message in messages:
            link.last_heard = loop.time()
            kind = message.WhichOneof("message")
            if kind == "step":
                self._take_step(link, message.step, link.last_heard)
            elif kind == "claims":
                self._answer_claims(link, message.claims)

    async def _write(
        self,
        link: Link,
        context: grpc.aio.ServicerContext[link_pb2.WorkerMessage, link_pb2.GatewayMessage],
    ) -> None:
        reply = link_pb2.HelloReply(
            gateway_id=self._gateway_id, heartbeat_interval_ms=self._heartbeat_interval_ms
        )
        await context.write(link_pb2.GatewayMessage(hello=reply))
        async for message in link.outgoing():
            await context.write(message)

    def _take_step(self, link: Link, step: step_pb2.StepOutput, now: float) -> None:
        result = self._table.take_step(link.sessions, step)
        for session in result.first_tokens:
            session.timeline.first_token = now
        for session in result.gaps:
            link.ask_again(session)
        if result.failed:
            self._dispatcher.move([session for session in result.failed if self._table.next_attempt(session)])

    def _answer_claims(self, link: Link, claims: link_pb2.Claims) -> None:
        for claim in claims.claims:
            misplaced = self._table.misplaced(link.sessions, claim.request_id, claim.attempt)
            if misplaced is not None and self.is_fit(misplaced, link.sessions.engine):
                misplaced.engines |= {link.sessions.engine}  # made known after the request came
                misplaced = None
            session = self._table.claim(link.sessions, claim.request_id, claim.attempt, claim.handle)
            if session is not None:
                link.grant(claim.handle)
                self._dispatcher.claimed(session)
                continue
            link.refuse(claim.handle)
            if misplaced is not None:
                self._dispatcher.redirect(misplaced, min(misplaced.engines))

    def _cancel(self, sessions: LinkSessions, handle: int) -> None:
        with contextlib.suppress(KeyError):  # the link is gone, and its sequences with it
            self._links[sessions][0].cancel(handle)

    def _lose(self, link: Link) -> None:
        """Moves what ran on a link; the second call of one link finds nothing."""
        moved = self._table.lose(link.sessions)
        if moved:
            reason = "silent" if link.is_silent else "broken"
            log.warning("link lost", worker=link.sessions.worker_id, reason=reason, requests=len(moved))
        self._dispatcher.move(moved)
