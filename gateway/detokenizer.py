"""Token ids to text, piece by piece, so that the pieces joined are the decoding of all ids at once.

A token alone may be a part of a character, or lack the space that belongs before it. A character is given
out once it is whole; bytes that make none are U+FFFD, as in the decoding of the whole.

`tokenizers` has a DecodeStream for this, which is not enough for ids that a model may well produce: it
raises when bytes of a byte-fallback vocabulary turn out not to be UTF-8, it repeats the prefix when that
ends within a character, and it decodes all that is pending again at each token, so that a long run of
special tokens or broken bytes costs its square.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""Stands where bytes are no whole character."""

MAX_CHARACTER_BYTES = 4
CONTEXT_TOKENS = 8
"""Enough context for any token: more tokens than a character can spread over."""
WINDOW_TOKENS = 4
"""New tokens are decoded with those before them up to this; cutting costs more than decoding a few twice."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """The text of one growing token sequence. Special and unknown ids give no text."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""

    def finish(self) -> str:
        """The text still held back, such as a last character that never became whole; once, at the end."""


class DetokenizerFactory:
    """Makes the detokenisers of one model, and keeps what they share.

    Args:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        decoders = _decoder_types(tokenizer)
        self._bytes = _TokenBytes(tokenizer, special) if decoders == ["ByteLevel"] else None
        self._kinds = _TokenKinds(tokenizer, special, has_byte_tokens="ByteFallback" in decoders)

    def start(self, prefix_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokeniser of what follows `prefix_ids`, whose own text is not given out again.

        The text of the prefix and all pieces together are the decoding of prefix and ids together; a
        character that the prefix only begins comes with the piece that completes it.
        """
        if self._bytes is not None:
            return _ByteLevelDetokenizer(self._bytes, prefix_ids)
        return _ContextDetokenizer(self._tokenizer, self._kinds, prefix_ids)


class _ByteLevelDetokenizer:
    """For vocabularies whose tokens are byte strings: the text is the UTF-8 decoding of all bytes."""

    __slots__ = ("_bytes", "_rest")

    def __init__(self, token_bytes: _TokenBytes, prefix_ids: Sequence[int]) -> None:
        self._bytes = token_bytes
        tail = b""
        for token in reversed(prefix_ids):
            tail = token_bytes[token] + tail
            if len(tail) >= MAX_CHARACTER_BYTES:
                break
        self._rest = tail
        """Bytes that may become a character."""
        self.push(())

    def push(self, ids: Sequence[int]) -> str:
        token_bytes = self._bytes
        data = self._rest + b"".join([token_bytes[token] for token in ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        return text


class _ContextDetokenizer:
    """For all other vocabularies: decodes new tokens together with those before them.

    A run of byte tokens waits for the token after it: if the run as a whole is not UTF-8, its decoding is
    one U+FFFD for each byte, also for those that were whole characters until then.
    """

    __slots__ = ("_given", "_kinds", "_run", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, kinds: _TokenKinds, prefix_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._kinds = kinds
        self._window: list[int] = []
        self._given = 0
        """Characters of the window's decoding that were given out."""
        self._run: list[int] = []
        """Byte tokens whose run goes on."""
        self.push(self._tail(prefix_ids))

    def push(self, ids: Sequence[int]) -> str:
        ready = self._ready(ids)
        if not ready:
            return ""
        self._window += ready
        text = self._decode(self._window)
        held = len(REPLACEMENT) if text.endswith(REPLACEMENT) else 0
        end = len(text) - held
        piece = text[self._given : end]
        self._given = end
        if len(self._window) > WINDOW_TOKENS:
            self._cut_window(held)
        return piece

    def finish(self) -> str:
        self._window += self._run
        self._run = []
        text = self._decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _ready(self, ids: Sequence[int]) -> list[int]:
        """The tokens whose decoding no later token can change but for a last incomplete character."""
        kinds = self._kinds
        visible = [token for token in ids if kinds[token] != _INVISIBLE]
        for end in range(len(visible), 0, -1):
            if kinds[visible[end - 1]] == _TEXT:
                ready = self._run + visible[:end]
                self._run = visible[end:]
                return ready
        self._run += visible
        return []

    def _cut_window(self, held: int) -> None:
        """Keeps only what the decoding of later tokens depends on."""
        for size in (CONTEXT_TOKENS,) if held else (1, CONTEXT_TOKENS):
            kept = self._window[-size:]
            text = self._decode(kept)
            if text:  # else a space at the start, already given out or stripped, would be stripped again
                self._window = kept
                self._given = len(text) - held
                return

    def _tail(self, prefix_ids: Sequence[int]) -> list[int]:
        """The end of the prefix, with enough context, and no run of bytes cut in two."""
        tail: list[int] = []
        text_tokens = 0
        for token in reversed(prefix_ids):
            kind = self._kinds[token]
            if kind != _INVISIBLE:
                tail.append(token)
            text_tokens += kind == _TEXT
            if text_tokens == CONTEXT_TOKENS:
                break
        return tail[::-1]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


_INVISIBLE, _BYTE, _TEXT = range(3)


class _TokenKinds(dict[int, int]):
    """What a token is to the text: nothing, a byte of a run, or a piece. Filled as tokens occur."""

    def __init__(self, tokenizer: Tokenizer, special: set[str], *, has_byte_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = special
        self._has_byte_tokens = has_byte_tokens

    def __missing__(self, token: int) -> int:
        content = self._tokenizer.id_to_token(token)
        if content is None:
            return _INVISIBLE  # not kept: ids that no vocabulary knows have no limit
        if content in self._special:
            kind = _INVISIBLE
        elif self._has_byte_tokens and _BYTE_TOKEN.fullmatch(content):
            kind = _BYTE
        else:
            kind = _TEXT
        self[token] = kind
        return kind


class _TokenBytes(dict[int, bytes]):
    """The bytes of a token of a byte-level vocabulary. Filled as tokens occur."""

    def __init__(self, tokenizer: Tokenizer, special: set[str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = special

    def __missing__(self, token: int) -> bytes:
        content = self._tokenizer.id_to_token(token)
        if content is None:
            return b""  # not kept: ids that no vocabulary knows have no limit
        self[token] = value = b"" if content in self._special else _bytes_of(content)
        return value


def _bytes_of(content: str) -> bytes:
    """A byte-level token's bytes; a token added as plain text, with characters of no byte, is that text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in content])
    except KeyError:
        return content.encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in GPT-2's alphabet (`bytes_to_unicode` in openai/gpt-2's encoder.py).

    Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()


def _decoder_types(tokenizer: Tokenizer) -> list[str]:
    """The types of the tokenizer's decoding steps, in order."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]
