"""Versions of the tools that make and run engines, by the names that manifests use."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

ABSENT = "none"

TENSORRT_LLM_TOOLS = ("tensorrt", "tensorrt_llm")
"""What an engine of kind `tensorrt_llm` must meet again where it runs: its plan names neither."""


def installed_versions(*distributions: str) -> dict[str, str]:
    """The installed version of each Python distribution, without importing it; ABSENT if it is not here."""
    return {name: _version(name) for name in distributions}


def vllm_versions() -> dict[str, str]:
    """What an engine of kind `vllm` must meet again where it runs, or its compiled code is not used.

    transformers is among them as the model's configuration, which it reads, is part of vLLM's cache keys;
    Python is, as compiled functions hold its bytecode.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return {**installed_versions("vllm", "torch", "triton", "transformers"), "python": python}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ABSENT
