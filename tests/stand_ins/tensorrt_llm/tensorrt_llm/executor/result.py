"""What LLM gives."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from typing_extensions import Self

from tensorrt_llm.contracted import contracted

if TYPE_CHECKING:
    from tensorrt_llm.made_up import Runtime, Sequence

POLL_S = 0.002
_REASONS = {"LENGTH": "length", "STOP_WORDS": "stop", "END_ID": "stop", "CANCELLED": "cancelled"}
Logprob = contracted("Logprob")
_CompletionOutput = contracted("CompletionOutput")


class CompletionOutput(_CompletionOutput):
    """Its lists are those of the answer so far; the differences are those of the last step."""

    shown = 0
    length = property(lambda self: len(self.token_ids))
    text_diff = ""
    token_ids_diff = property(lambda self: self.token_ids[self.shown :])
    logprobs_diff = property(lambda self: self.logprobs[self.shown :])


class RequestOutput:
    """An answer. Iterating gives this same object at each step; leaving the loop stops nothing."""

    def __init__(self, runtime: Runtime, *, wants_logprobs: bool) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[tuple[list[int], str, list[float]]] = asyncio.Queue()
        self._wants_logprobs = wants_logprobs
        self._is_aborted = False
        self.request_id = 0
        self.outputs = [CompletionOutput(0)]
        self.finished = False

    def tell(self, sequence: Sequence, tokens: list[int], why: str) -> None:
        self._loop.call_soon_threadsafe(
            self._steps.put_nowait, (tokens, why, sequence.logprobs[-len(tokens) :] if tokens else [])
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self.finished:
            raise StopAsyncIteration
        tokens, why, logprobs = await self._steps.get()
        output = self.outputs[0]
        output.shown = len(output.token_ids)
        output.token_ids += tokens
        if self._wants_logprobs:
            output.logprobs += [
                {token: Logprob(value)} for token, value in zip(tokens, logprobs, strict=True)
            ]
        if why:
            self.finished = True
            output.finish_reason = _REASONS[why]
        return self

    def __iter__(self) -> None:
        raise NotImplementedError("the mesh waits for no result in a thread")

    __next__ = __iter__

    async def aresult(self) -> Self:
        async for _ in self:
            pass
        return self

    def __await__(self):
        return self.aresult().__await__()

    def result(self, timeout: float | None = None) -> None:
        raise NotImplementedError("the mesh waits for no result in a thread")

    def abort(self) -> None:
        self._is_aborted = True
        self._runtime.cancel(self.request_id)

    def aborted(self) -> bool:
        return self._is_aborted


class IterationResult:
    """Statistics; iterating ends once nothing new came for `timeout` seconds."""

    def __init__(self, runtime: Runtime, timeout: float) -> None:
        self._runtime = runtime
        self._timeout = timeout

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout

    def get_results(self) -> list[dict]:
        return [self._runtime.stats.popleft() for _ in range(len(self._runtime.stats))]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict:
        deadline = time.monotonic() + self._timeout
        while not self._runtime.stats:
            if time.monotonic() > deadline:
                raise StopAsyncIteration
            await asyncio.sleep(POLL_S)
        return self._runtime.stats.popleft()
