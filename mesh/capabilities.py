"""Names of what an engine can do, as its manifest lists them; what is not listed is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

REPRODUCIBLE = "reproducible"
"""A greedy answer is the same token for token: alone, batched, and resumed on another worker."""

LOGPROBS = "logprobs"
"""Log probabilities of the chosen tokens."""

TOP_LOGPROBS = "top_logprobs"
"""Log probabilities of the most likely tokens beside the chosen one."""

SEED = "seed"
"""Sampling from a seed that the client sets."""

PENALTIES = "penalties"
"""Repetition, presence and frequency penalties."""

PREFIX_CACHING = "prefix_caching"
"""A prompt that begins like an earlier one skips the part they share."""

GUIDED_DECODING = "guided_decoding"
"""Answers in a form that the client gives: a JSON schema, a regular expression, a grammar."""

SAMPLING = "sampling"
"""A temperature above 0. Every engine can unless it lists GREEDY_ONLY, so that no manifest lists it."""

GREEDY_ONLY = "greedy_only"
"""A limit: the engine takes only requests with temperature 0."""


def lora(name: str) -> str:
    """The capability to answer with an adapter, by its name in the model file."""
    return f"lora:{name}"


def offered(listed: Iterable[str]) -> frozenset[str]:
    """What an engine whose manifest lists these can do."""
    names = frozenset(listed)
    return names if GREEDY_ONLY in names else names | {SAMPLING}
