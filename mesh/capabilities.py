"""Names of what an engine can do, as its manifest lists them; what is not listed is refused."""

from __future__ import annotations

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
