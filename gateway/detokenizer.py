"""Token ids to text, piece by piece, so that the pieces joined are the decoding of all ids at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""Stands where bytes are no whole character."""


class Detokenizer:
    """The text of one growing token sequence. Special tokens give no text.

    A token alone may be a part of a character, or lack the space that belongs before it, so tokens are
    decoded in their context (`tokenizers`' DecodeStream) and a character is given out once it is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = 0
        self._is_broken = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        pieces = []
        for token in ids:
            self._ids.append(token)
            piece = self._step(token)
            if piece:
                pieces.append(piece)
                self._given += len(piece)
        return "".join(pieces)

    def finish(self) -> str:
        """The text still held back: a last character that never became whole, as U+FFFD."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._given :]
        self._given += len(text)
        return text

    def _step(self, token: int) -> str | None:
        if not self._is_broken:
            try:
                return self._stream.step(self._tokenizer, token)
            except Exception:  # noqa: BLE001 - the library raises Exception itself
                # Some sequences of incomplete characters change what came before them; the stream then
                # refuses to go on. Rare, and never in text that a model means, so the slow way does.
                self._is_broken = True
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return None if whole.endswith(REPLACEMENT) else whole[self._given :]
