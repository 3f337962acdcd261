"""One streamed answer as the client sees it, and its figures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from enginemesh.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def for_terminal(text: str) -> str:
    """Text of a model that may go to a terminal: without the characters that would command it."""
    return text.translate(_CONTROLS)


class Answer:
    """Iterates over the messages of one Generate call, and times them by this process's clock.

    Args:
        call: The call, just made.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._begin = time.monotonic()
        self._first: float | None = None
        self._last = self._begin
        self.finished = inference_pb2.Finished()

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]:
        for message in self._call:
            self._last = time.monotonic()
            if message.HasField("finished"):
                self.finished = message.finished
            elif self._first is None:
                self._first = self._last
            yield message

    def cancel(self) -> None:
        """Ends the call early."""
        self._call.cancel()

    @property
    def time_to_first_token_s(self) -> float:
        """Call to first delta, in seconds."""
        return (self._first or self._last) - self._begin

    @property
    def time_per_token_s(self) -> float:
        """Mean time of each token after the first, in seconds; 0 if there was but one."""
        following = self.finished.usage.completion_tokens - 1
        return (self._last - (self._first or self._last)) / following if following > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer over the time of the whole call."""
        return self.finished.usage.completion_tokens / max(1e-9, self._last - self._begin)

    def summary(self) -> str:
        """The figures in one line."""
        finished = self.finished
        reason = inference_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
        moved = f" · {finished.timings.attempts} attempts" if finished.timings.attempts > 1 else ""
        return (
            f"first token {self.time_to_first_token_s * 1000:.0f} ms"
            f" · {self.time_per_token_s * 1000:.1f} ms per token"
            f" · {self.tokens_per_second:.1f} tokens/s"
            f" · {finished.usage.prompt_tokens} tokens in, {finished.usage.completion_tokens} out"
            f" · {reason}{moved} · request {finished.request_id}"
        )
