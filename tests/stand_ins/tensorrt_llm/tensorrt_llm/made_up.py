"""What both interfaces of the stand-in run on: batching in flight over a made-up model."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BLOCKS = 2048
_SPREAD = 2_654_435_761


@dataclass
class Sequence:
    """A sequence in flight. `tell` gets its new tokens and, at the end, why it ended."""

    prompt: list[int]
    limit: int
    tell: Callable[[Sequence, list[int], str], None]
    stops: frozenset[int] = frozenset()
    end_id: int = -1
    seed: int | None = None
    changes: str = ""
    id: int = 0
    answer: list[int] = field(default_factory=list)
    prefilled: int = 0
    reused_blocks: int = 0
    arrival: float = 0.0
    first_token: float = 0.0
    is_cancelled: bool = False
    state: int = 0

    @property
    def logprobs(self) -> list[float]:
        return [-0.5 - token % 7 / 10 for token in self.answer]


class Runtime:
    """Steps sequences in a thread of its own until `close`."""

    def __init__(self, folder: Path, *, max_batch_size: int, max_num_tokens: int, is_chunked: bool) -> None:
        config = json.loads((folder / "config.json").read_text())
        build, model = config["build_config"], config["pretrained_config"]
        for rank in range(model.get("mapping", {}).get("world_size", 1)):
            if not (folder / f"rank{rank}.engine").is_file():
                raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: no rank{rank}.engine")
        self.vocab_size = model["vocab_size"]
        self.max_seq_len = build["max_seq_len"]
        self.max_input_len = build.get("max_input_len", self.max_seq_len - 1)
        self.tokens_per_block = build.get("plugin_config", {}).get("tokens_per_block", 32)
        self.max_batch_size = min(max_batch_size, build["max_batch_size"])
        self.max_num_tokens = max_num_tokens
        self.is_chunked = is_chunked
        self.stats: deque[dict] = deque(maxlen=1000)
        self.is_closed = False
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._known_blocks: set[int] = set()
        self._last_id = 0
        self._iteration = 0
        self._looked_for = self._found = 0
        self._step_s = float(os.environ.get("TENSORRT_LLM_STAND_IN_STEP_MS", "2")) / 1000
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> int:
        length = len(sequence.prompt)
        longest = self.max_input_len if self.is_chunked else min(self.max_input_len, self.max_num_tokens)
        if length > longest:
            raise RuntimeError(
                f"[TensorRT-LLM][ERROR] Assertion failed: Prompt length ({length}) exceeds maximum input "
                f"length ({longest}).\n1 0x7f0000000000 /usr/local/lib/libtensorrt_llm.so(+0x1) [0x1]"
            )
        with self._changed:
            self._last_id += 1
            sequence.id = self._last_id
            sequence.arrival = time.monotonic()
            sequence.limit = min(sequence.limit, self.max_seq_len - length)
            # An adapter or a guide makes it another answer.
            begin = zlib.crc32(sequence.changes.encode())
            sequence.state = zlib.crc32(array("I", sequence.prompt).tobytes(), begin)
            self._waiting.append(sequence)
            self._changed.notify_all()
        return sequence.id

    def cancel(self, identifier: int) -> None:
        with self._changed:
            for sequence in (*self._running.values(), *self._waiting):
                if sequence.id == identifier:
                    sequence.is_cancelled = True

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self.is_closed):
                    self._changed.wait()
                if self.is_closed:
                    return
            time.sleep(self._step_s)
            _abort_if_told()
            with self._changed:
                self._step()

    def _step(self) -> None:
        while self._waiting and len(self._running) < self.max_batch_size:
            sequence = self._waiting.popleft()
            self._running[sequence.id] = sequence
            self._look_for_blocks(sequence)
        budget = self.max_num_tokens
        scheduled = 0
        for sequence in list(self._running.values()):
            if sequence.is_cancelled:
                self._end(sequence, [], "CANCELLED")
                continue
            left = len(sequence.prompt) - sequence.prefilled
            taken = min(left, budget) if left else min(1, budget)
            budget -= taken
            scheduled += bool(taken)
            if left:
                sequence.prefilled += taken
            if taken and sequence.prefilled == len(sequence.prompt):
                self._give(sequence)
        self._note(scheduled)

    def _give(self, sequence: Sequence) -> None:
        mixed = (
            sequence.state
            if sequence.seed is None
            else zlib.crc32(str(sequence.seed).encode(), sequence.state)
        )
        token = (mixed * _SPREAD % 2**32) * self.vocab_size >> 32
        sequence.state = zlib.crc32(array("I", [token]).tobytes(), sequence.state)
        if not sequence.answer:
            sequence.first_token = time.monotonic()
        if token == sequence.end_id:
            self._end(sequence, [], "END_ID")  # which is not given out
            return
        sequence.answer.append(token)
        if token in sequence.stops:
            self._end(sequence, [token], "STOP_WORDS")
        elif len(sequence.answer) == sequence.limit:
            self._end(sequence, [token], "LENGTH")
        else:
            sequence.tell(sequence, [token], "")

    def _end(self, sequence: Sequence, tokens: list[int], why: str) -> None:
        del self._running[sequence.id]
        sequence.tell(sequence, tokens, why)

    def _look_for_blocks(self, sequence: Sequence) -> None:
        size = self.tokens_per_block
        is_found = True
        for end in range(size, len(sequence.prompt), size):
            key = zlib.crc32(array("I", sequence.prompt[:end]).tobytes())
            is_found = is_found and key in self._known_blocks
            sequence.reused_blocks += is_found
            self._looked_for += 1
            self._found += is_found
            self._known_blocks.add(key)
        sequence.prefilled = sequence.reused_blocks * size

    def _note(self, scheduled: int) -> None:
        self._iteration += 1
        used = sum(
            -(-(len(s.prompt) + len(s.answer)) // self.tokens_per_block) for s in self._running.values()
        )
        self.stats.append(
            {
                "iter": self._iteration,
                "iterLatencyMS": self._step_s * 1000,
                "numActiveRequests": len(self._running),
                "numQueuedRequests": len(self._waiting),
                "maxNumActiveRequests": self.max_batch_size,
                "kvCacheStats": {
                    "maxNumBlocks": MAX_BLOCKS,
                    "freeNumBlocks": MAX_BLOCKS - used,
                    "usedNumBlocks": used,
                    "tokensPerBlock": self.tokens_per_block,
                    "reusedBlocks": self._found,
                    "missedBlocks": self._looked_for - self._found,
                    "cacheHitRate": self._found / self._looked_for if self._looked_for else 0.0,
                },
                "crossKvCacheStats": None,
                "staticBatchingStats": None,
                "inflightBatchingStats": {"numScheduledRequests": scheduled, "numPausedRequests": 0},
                "specDecodingStats": None,
            }
        )


def _abort_if_told() -> None:
    """As when C++ fails: no exception, no clean-up, SIGABRT."""
    told = os.environ.get("TENSORRT_LLM_STAND_IN_ABORT")
    if not told:
        return
    with contextlib.suppress(FileNotFoundError):
        Path(told).unlink()  # one process finds it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
