"""Finds stop strings in text that arrives in pieces, and never lets out what may be the start of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string.

    The match that ends first wins, of several that end together the one that starts first; so the outcome
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes a piece; returns what may go out, and the stop string if one is complete.

        After a match nothing more may be pushed.
        """
        if not self._stops:
            return text, None
        window = self._held + text
        match = self._first_match(window)
        if match is not None:
            start, stop = match
            self._held = ""
            return window[:start], stop
        keep = self._possible_start(window)
        self._held = window[keep:]
        return window[:keep], None

    def finish(self) -> str:
        """The text that was held back and turned out to be no stop string."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, window: str) -> tuple[int, str] | None:
        found = [
            (start + len(stop), start, stop) for stop in self._stops if (start := window.find(stop)) >= 0
        ]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, window: str) -> int:
        """Where the longest suffix begins that is a proper prefix of some stop string."""
        earliest = len(window)
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(window)), len(window) - earliest, -1):
                if window.endswith(stop[:size]):
                    earliest = len(window) - size
                    break
        return earliest
