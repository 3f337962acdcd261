"""Speculative decoding of kind `openvino`: what the manifest says of it, and room that lasts.

What OpenVINO GenAI 2026.4.1 gets wrong, and what is done here so that it cannot happen:

- A sequence that is preempted for lack of KV cache gets wrong tokens afterwards, or ends the process. So
  each gets blocks for its whole length before it begins, and waits until there are enough.
- A draft model runs ahead of the main one when a prompt takes several steps. So prompts are never split.
- Sampling with a draft model ends the process. So it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.sizing import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DRAFT = "draft"
"""Folder of the draft model in the engine."""

_METHODS = ("draft_model", "prompt_lookup")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are guessed ahead.

    Attributes:
        method: "draft_model", or "prompt_lookup": what followed the last tokens where they stood before.
        tokens: Guessed in each step, for each sequence.
        ngram_size: The longest run of tokens that is looked up; 0 for a draft model.
    """

    method: str
    tokens: int
    ngram_size: int = 0

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Speculation | None:
        """What an engine's options say; None if it has no speculation.

        Raises:
            ValueError: they make no sense.
        """
        method = options.get("speculation")
        if method is None:
            return None
        if method not in _METHODS:
            raise ValueError(f"speculation {method!r} is none of {', '.join(_METHODS)}")
        ngram_size = int(options.get("speculation_ngram_size", "0"))
        found = cls(method, int(options.get("speculation_tokens", "0")), ngram_size)
        if found.tokens < 1 or (method == "prompt_lookup" and ngram_size < 1):
            raise ValueError(f"speculation by {method} needs at least one token: {found}")
        return found

    @property
    def has_draft(self) -> bool:
        """Whether a second model guesses."""
        return self.method == "draft_model"

    @property
    def extra_tokens(self) -> int:
        """Tokens that a sequence may hold beyond its length, while they are guesses."""
        return self.tokens + 1

    def pipeline_properties(self, folder: Path, properties: Mapping[str, Any]) -> dict[str, Any]:
        """What the pipeline must be told to speculate."""
        if not self.has_draft:
            return {"prompt_lookup": True}
        import openvino_genai

        return {"draft_model": openvino_genai.draft_model(str(folder / DRAFT), "CPU", **properties)}

    def configure(self, config: Any) -> None:
        """Adds to the configuration of a request what the pipeline wants to know of each."""
        config.num_assistant_tokens = self.tokens
        if self.ngram_size:
            config.max_ngram_size = self.ngram_size


class Room:
    """Blocks of the KV cache that sequences have to themselves until they end."""

    def __init__(self, blocks: int) -> None:
        self._free = blocks
        self._taken: dict[int, int] = {}

    def take(self, sequence_id: int, tokens: int) -> bool:
        """Gives a sequence blocks for as many tokens; False if there are too few."""
        blocks = blocks_of(tokens)
        if blocks > self._free:
            return False
        self._free -= blocks
        self._taken[sequence_id] = blocks
        return True

    def give_back(self, sequence_id: int) -> None:
        """Frees the blocks of a sequence whose own blocks the pipeline has freed."""
        self._free += self._taken.pop(sequence_id, 0)


def blocks_of(tokens: int) -> int:
    """Blocks that a sequence of this length may hold: the step that fills the last one needs another."""
    return -(-tokens // BLOCK_TOKENS) + 1
