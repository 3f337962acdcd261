"""The text of one answer: detokenised, and cut at the first stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenizers import Tokenizer


class OutputStream:
    """Turns new token ids into text that the client may see.

    Args:
        tokenizer: The model's.
        stops: Stop strings of the request.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    def push(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """New text, and the stop string if the text ended at one."""
        return self._matcher.push(self._detokenizer.push(token_ids))

    def finish(self) -> tuple[str, str | None]:
        """What was held back; a stop string may still be met in it."""
        text, stop = self._matcher.push(self._detokenizer.finish())
        if stop is None:
            text += self._matcher.finish()
        return text, stop
