"""The protocol's core: which request is where, who may run it, and what to undo when it ends.

Pure bookkeeping, with the session's own (gateway/session.py). docs/protocol.md states the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginemesh.internal.v1 import step_pb2
from gateway.session import State
from mesh.errors import AlreadyExistsError

if TYPE_CHECKING:
    from gateway.session import Session
    from mesh.bus.requests import Ticket


@dataclass(slots=True, eq=False)
class LinkSessions:
    """The requests that one worker runs for this gateway, by handle."""

    worker_id: str
    engine: str
    by_handle: dict[int, Session] = field(default_factory=dict)


@dataclass(slots=True)
class StepResult:
    """What a frame asks of the gateway beyond passing tokens on."""

    first_tokens: list[Session] = field(default_factory=list)
    gaps: list[Session] = field(default_factory=list)
    failed: list[Session] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an ended request leaves to be undone outside: a queue entry, or a running sequence."""

    ticket: Ticket | None = None
    link: LinkSessions | None = None
    handle: int = 0


class RequestTable:
    """All requests of one gateway process."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._is_empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """Enters an accepted request.

        Raises:
            AlreadyExistsError: a request of this name is in flight.
        """
        if session.request_id in self._sessions:
            raise AlreadyExistsError("request", session.request_id)
        self._sessions[session.request_id] = session
        self._is_empty.clear()

    def claim(self, link: LinkSessions, request_id: str, attempt: int, handle: int) -> Session | None:
        """A worker asks to run an attempt: its request, or None if it must not. The first to ask wins."""
        session = self._sessions.get(request_id)
        if session is None or session.state is not State.QUEUED or session.attempt != attempt:
            return None
        if link.engine not in session.engines:
            return None
        session.state, session.link, session.handle = State.RUNNING, link, handle
        session.ticket = None
        session.worker_id, session.worker_engine = link.worker_id, link.engine
        link.by_handle[handle] = session
        return session

    def misplaced(self, link: LinkSessions, request_id: str, attempt: int) -> Session | None:
        """The request whose claim was refused only because this link's engine cannot run it."""
        session = self._sessions.get(request_id)
        if session is None or session.state is not State.QUEUED or session.attempt != attempt:
            return None
        return session if link.engine not in session.engines else None

    def take_step(self, link: LinkSessions, step: step_pb2.StepOutput) -> StepResult:
        """Gives a frame's tokens and ends to its requests; rows of ended requests are ignored."""
        result = StepResult()
        tokens = list(step.token_ids)
        logprobs = list(step.logprobs)
        start = 0
        for handle, offset, count in zip(step.ids, step.offsets, step.counts, strict=True):
            end = start + count
            session = link.by_handle.get(handle)
            if session is not None:
                if not session.token_ids and count:
                    result.first_tokens.append(session)
                if not session.accept(offset, tokens[start:end], logprobs[start:end]):
                    result.gaps.append(session)
            start = end
        for finish in step.finishes:
            session = link.by_handle.get(finish.id)
            if session is None or session in result.gaps:
                continue
            del link.by_handle[finish.id]
            if finish.reason == step_pb2.SEQUENCE_FINISH_REASON_ERROR:
                result.failed.append(session)
            else:
                session.link = None
                session.close(finish)
        return result

    def next_attempt(self, session: Session) -> bool:
        """Prepares a request to run elsewhere; False if it has ended or has no attempt left."""
        if session.state is State.ENDED or session.error is not None or not session.begin_attempt():
            return False
        session.state = State.QUEUED
        return True

    def lose(self, link: LinkSessions) -> list[Session]:
        """A link broke or fell silent: the requests that must go on elsewhere, already QUEUED again."""
        orphans, link.by_handle = list(link.by_handle.values()), {}
        return [session for session in orphans if self.next_attempt(session)]

    def end(self, session: Session) -> Leftover:
        """Forgets a request, however it ended. Harmless to repeat."""
        if session.state is State.ENDED:
            return Leftover()
        leftover = Leftover(ticket=session.ticket)
        if session.link is not None and session.handle in session.link.by_handle:
            del session.link.by_handle[session.handle]
            leftover = Leftover(link=session.link, handle=session.handle)
        session.state, session.ticket, session.link = State.ENDED, None, None
        if self._sessions.get(session.request_id) is session:  # not one whose name was refused
            del self._sessions[session.request_id]
        if not self._sessions:
            self._is_empty.set()
        return leftover

    async def until_empty(self, timeout_s: float) -> bool:
        """Waits until no request is left; False if some were after `timeout_s` seconds."""
        if not self._sessions:
            return True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        return not self._sessions

    def queued(self) -> list[Session]:
        """Requests that no worker has claimed."""
        return [session for session in self._sessions.values() if session.state is State.QUEUED]
