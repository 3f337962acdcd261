"""Finds stop strings in text that arrives in pieces, and never lets out what may be the start of one."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string.

    The match that ends first wins, of several that end together the one that starts first; so the outcome
    does not depend on how the text is cut into pieces. An automaton (Aho and Corasick, 1975) reads each
    character once, however many stop strings there are and however much of them is held back.

    Args:
        stops: Stop strings, none of them empty.
    """

    __slots__ = ("_automaton", "_held", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _Automaton(stops) if stops else None
        self._state = _ROOT
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes a piece; returns what may go out, and the stop string if one is complete.

        After a match nothing more may be pushed.
        """
        automaton = self._automaton
        if automaton is None or not text:
            return text, None
        self._state, end = automaton.read(self._state, text)
        stop = automaton.matches[self._state]
        window = self._held + text
        if stop is not None:
            start = len(self._held) + end - len(stop)
            self._held = ""
            return window[:start], stop
        start = len(window) - automaton.depths[self._state]
        self._held = window[start:]
        return window[:start], None

    def finish(self) -> str:
        """The text that was held back and turned out to be no stop string."""
        text, self._held = self._held, ""
        self._state = _ROOT
        return text


_ROOT = 0


class _Automaton:
    """A state is the longest end of the text so far that begins some stop string.

    Attributes:
        depths: Characters of that end, by state.
        matches: The longest stop string that is complete in the state, if any.
    """

    __slots__ = ("_fallbacks", "_first_character", "_steps", "depths", "matches")

    def __init__(self, stops: Sequence[str]) -> None:
        self._steps: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fallbacks = [_ROOT] * len(self._steps)
        self._link()
        self._first_character = re.compile(f"[{re.escape(''.join(self._steps[_ROOT]))}]")

    def read(self, state: int, text: str) -> tuple[int, int]:
        """The state after `text`, or after the first stop string complete in it, and where that ends."""
        steps, matches = self._steps, self.matches
        place, end = 0, len(text)
        while place < end:
            if state == _ROOT:
                found = self._first_character.search(text, place)
                if found is None:
                    return _ROOT, end
                place = found.start()
            character = text[place]
            place += 1
            while character not in steps[state] and state != _ROOT:
                state = self._fallbacks[state]
            state = steps[state].get(character, _ROOT)
            if matches[state] is not None:
                break
        return state, place

    def _add(self, stop: str) -> None:
        state = _ROOT
        for depth, character in enumerate(stop, start=1):
            following = self._steps[state].get(character)
            if following is None:
                following = self._steps[state][character] = len(self._steps)
                self._steps.append({})
                self.depths.append(depth)
                self.matches.append(None)
            state = following
        self.matches[state] = stop

    def _link(self) -> None:
        """Finds each state's fallback: the state of the longest proper end of it; breadth first."""
        waiting = deque(self._steps[_ROOT].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._steps[state].items():
                fallback = self._fallbacks[state]
                while character not in self._steps[fallback] and fallback != _ROOT:
                    fallback = self._fallbacks[fallback]
                self._fallbacks[following] = self._steps[fallback].get(character, _ROOT)
                waiting.append(following)
            if self.matches[state] is None:
                self.matches[state] = self.matches[self._fallbacks[state]]
