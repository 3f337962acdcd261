"""Backpressure of one gateway: what may wait, for how long, and whose turn it is.

A model's Redis queue holds only a window of this gateway's requests; the others wait here, in fair order.
So the order among clients can still change while requests wait, and a refused one costs Redis nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.fair_queue import FairQueue
from mesh.errors import ExhaustedError
from mesh.model_fields import ServingSettings

if TYPE_CHECKING:
    from gateway.session import Session
    from mesh.settings import GatewaySettings

RATE_WINDOW_S = 5.0
UNKNOWN_RETRY_S = 1.0
NO_LIMITS = ServingSettings()
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class DrainRate:
    """How fast workers take prompt tokens: an exponentially weighted mean over some seconds.

    It begins when a worker first takes something: until then there may be no worker at all, which starts
    because requests wait, and is no slower for their wait.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._began = self._updated = -math.inf

    def record(self, tokens: int, now: float) -> None:
        """A worker took a request."""
        if self._began == -math.inf:
            self._began = self._updated = now
        self._decay(now)
        self._tokens += tokens

    def tokens_per_s(self, now: float) -> float:
        """The rate at this moment; 0 before anything was taken."""
        if self._began == -math.inf:
            return 0.0
        self._decay(now)
        # A young average has seen less than its window; without this it would be far too low.
        seen = 1 - math.exp(-max(now - self._began, 1e-3) / RATE_WINDOW_S)
        return self._tokens / (RATE_WINDOW_S * seen)

    def _decay(self, now: float) -> None:
        self._tokens *= math.exp(-(now - self._updated) / RATE_WINDOW_S)
        self._updated = now


@dataclass(slots=True)
class _Model:
    rate: DrainRate = field(default_factory=DrainRate)
    waiting: FairQueue[Session] = field(default_factory=FairQueue)
    in_redis: set[Session] = field(default_factory=set)
    tokens_in_redis: int = 0
    since: dict[Session, float] = field(default_factory=dict)
    """When each that waits came, the oldest first."""

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.in_redis)

    @property
    def tokens(self) -> int:
        return self.waiting.tokens + self.tokens_in_redis


class WaitingRoom:
    """Requests of this gateway that no worker has claimed. Pure; times are of the event loop's clock."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._models: dict[str, _Model] = {}
        self._by_client: dict[str, int] = {}

    def check(
        self, model: str, client: str, tokens: int, now: float, serving: ServingSettings = NO_LIMITS
    ) -> None:
        """Refuses what there is no room for, by the gateway's limits or by the model's if they are stricter.

        Raises:
            ExhaustedError: names the limit, and when to come again by the rate at which the queue drains.
        """
        settings = self._settings
        state = self._models.get(model)
        mine = self._by_client.get(client, 0)
        retry = self._retry_after(state, tokens, now)
        if mine >= settings.max_client_requests:
            raise _full("max_client_requests", mine, settings.max_client_requests, retry)
        if state is None:
            return
        limit, allowed = _stricter(
            "max_queued_requests",
            settings.max_queued_requests,
            "max_waiting_requests",
            serving.max_waiting_requests,
        )
        if state.requests >= allowed:
            raise _full(limit, state.requests, allowed, retry)
        limit, allowed = _stricter(
            "max_queued_tokens", settings.max_queued_tokens, "max_waiting_tokens", serving.max_waiting_tokens
        )
        if state.tokens + tokens > allowed and state.requests:
            raise _full(limit, state.tokens + tokens, allowed, retry)
        limit, allowed = _stricter(
            "max_queue_s", settings.max_queue_s, "max_waiting_s", serving.max_waiting_s
        )
        rate = state.rate.tokens_per_s(now)
        wait_s = state.tokens / rate if rate > 1 else 0.0
        if state.requests > settings.queue_window and wait_s > allowed:
            raise _full(limit, round(wait_s, 1), allowed, retry)

    def enter(self, session: Session, now: float) -> None:
        """A new request waits."""
        self._by_client[session.client] = self._by_client.get(session.client, 0) + 1
        state = self._model(session.model)
        if not state.requests:
            # While nothing waited, nothing could be taken: that the rate fell says nothing of the workers.
            state.rate = DrainRate()
        state.since[session] = now
        state.waiting.add(
            session,
            client=session.client,
            priority=session.priority,
            tokens=len(session.prompt_ids),
            now=now,
        )

    def next_for_redis(self, model: str, now: float) -> list[Session]:
        """The requests that should go into the model's Redis queue now, in order."""
        state = self._model(model)
        released = []
        while len(state.in_redis) < self._settings.queue_window:
            session = state.waiting.pop(now)
            if session is None:
                break
            state.in_redis.add(session)
            state.tokens_in_redis += len(session.prompt_ids)
            released.append(session)
        return released

    def claimed(self, session: Session, now: float) -> None:
        """A worker took a request."""
        if self._leave_redis(session):
            self._models[session.model].rate.record(len(session.prompt_ids), now)

    def end(self, session: Session) -> None:
        """A request is over. Call once for each that entered."""
        state = self._models[session.model]
        if state.waiting.remove(session):
            del state.since[session]
        else:
            self._leave_redis(session)
        self._by_client[session.client] -= 1
        if not self._by_client[session.client]:
            del self._by_client[session.client]

    def depth(self) -> dict[str, tuple[int, int]]:
        """By model: requests and prompt tokens that wait, here and in Redis."""
        return {name: (state.requests, state.tokens) for name, state in self._models.items()}

    def held_back(self, model: str) -> int:
        """Requests that wait here because the window in Redis is full."""
        state = self._models.get(model)
        return len(state.waiting) if state else 0

    def oldest_s(self, model: str, now: float) -> float:
        """How long the request that has waited longest has waited; 0 if none waits."""
        state = self._models.get(model)
        return now - next(iter(state.since.values()), now) if state else 0.0

    def _leave_redis(self, session: Session) -> bool:
        state = self._models[session.model]
        if session not in state.in_redis:
            return False
        state.in_redis.remove(session)
        del state.since[session]
        state.tokens_in_redis -= len(session.prompt_ids)
        return True

    def _model(self, name: str) -> _Model:
        state = self._models.get(name)
        if state is None:
            state = self._models[name] = _Model()
        return state

    @staticmethod
    def _retry_after(state: _Model | None, tokens: int, now: float) -> float:
        rate = state.rate.tokens_per_s(now) if state else 0.0
        if state is None or rate <= 0:
            return UNKNOWN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, (state.tokens + tokens) / rate / 2))


def _stricter(limit: str, allowed: float, serving_limit: str, serving_allowed: float) -> tuple[str, float]:
    """Name and value of the stricter of two limits, the gateway's and the model's; its 0 is none."""
    if 0 < serving_allowed < allowed:
        return f"serving.{serving_limit}", serving_allowed
    return limit, allowed


def _full(limit: str, actual: float, allowed: float, retry_after_s: float) -> ExhaustedError:
    message = f"{limit}: {actual:g} is over the limit of {allowed:g}"
    return ExhaustedError(message, retry_after_s=retry_after_s, limit=limit, allowed=allowed, actual=actual)
