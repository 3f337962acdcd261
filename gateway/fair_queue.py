"""Whose request goes next: priorities that age, and fair shares between clients. Pure.

Requests of one model wait here until the model's Redis queue has room for more of this gateway's. Within
a priority, clients take turns by deficit round robin over prompt tokens (Shreedhar and Varghese, 1995), so
that one client's thousand long prompts cost another's single short one no more than a turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from mesh.bus.keys import PRIORITIES

if TYPE_CHECKING:
    from collections.abc import Hashable

QUANTUM_TOKENS = 512
"""What a client may take per turn; about one prompt, so that turns are short."""

AGEING_S = 5.0
"""A request that has waited this long at the head of its priority goes before the next higher one."""

Item = TypeVar("Item")


@dataclass(slots=True)
class _Waiting(Generic[Item]):
    item: Item
    tokens: int
    since: float


@dataclass(slots=True)
class _Client(Generic[Item]):
    waiting: deque[_Waiting[Item]] = field(default_factory=deque)
    deficit: int = 0


class FairQueue(Generic[Item]):
    """Waiting requests of one model.

    Costs are in tokens (at least 1), times in seconds of any steady clock.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, OrderedDict[str, _Client[Item]]] = {name: OrderedDict() for name in PRIORITIES}
        self._places: dict[Hashable, tuple[str, str]] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, item: Item, *, client: str, priority: str, tokens: int, now: float) -> None:
        """Puts a request at the end of its client's line."""
        lane = self._lanes[priority]
        lane.setdefault(client, _Client()).waiting.append(_Waiting(item, max(1, tokens), now))
        self._places[item] = (priority, client)
        self.tokens += max(1, tokens)

    def remove(self, item: Item) -> bool:
        """Takes a request out wherever it stands; False if it does not wait here."""
        place = self._places.pop(item, None)
        if place is None:
            return False
        priority, name = place
        client = self._lanes[priority][name]
        waiting = next(entry for entry in client.waiting if entry.item is item)
        client.waiting.remove(waiting)
        self.tokens -= waiting.tokens
        if not client.waiting:
            del self._lanes[priority][name]
        return True

    def pop(self, now: float) -> Item | None:
        """Takes out the request that goes next; None if none waits."""
        for priority in self._order(now):
            lane = self._lanes[priority]
            if lane:
                return self._turn(lane)
        return None

    def _order(self, now: float) -> list[str]:
        """Priorities, those first whose oldest request has aged past those above it."""

        def rank(priority: str) -> float:
            heads = [client.waiting[0].since for client in self._lanes[priority].values()]
            age = now - min(heads, default=now)
            return PRIORITIES.index(priority) - age / AGEING_S

        return sorted(PRIORITIES, key=rank)

    def _turn(self, lane: OrderedDict[str, _Client[Item]]) -> Item:
        while True:
            name, client = next(iter(lane.items()))
            entry = client.waiting[0]
            if entry.tokens <= client.deficit or len(lane) == 1:
                client.deficit = max(0, client.deficit - entry.tokens)
                client.waiting.popleft()
                if not client.waiting:
                    del lane[name]
                del self._places[entry.item]
                self.tokens -= entry.tokens
                return entry.item
            client.deficit += QUANTUM_TOKENS
            lane.move_to_end(name)
