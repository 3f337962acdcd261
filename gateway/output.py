"""The text of one answer: detokenised, and cut at the first stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.stop_strings import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.detokenizer import Detokenizer


class OutputStream:
    """Turns new token ids into text that the client may see.

    Args:
        detokenizer: A fresh one of the model's.
        stops: Stop strings of the request.
    """

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """New text, and the stop string if the text ended at one."""
        return self._matcher.push(self._detokenizer.push(token_ids))

    def finish(self) -> tuple[str, str | None]:
        """What was held back; a stop string may still be met in it."""
        text, stop = self._matcher.push(self._detokenizer.finish())
        if stop is None:
            text += self._matcher.finish()
        return text, stop
