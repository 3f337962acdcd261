"""Builders by engine kind. docs/builds.md, "Adding a kind", lists what belongs to a new one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from mesh.errors import UnsupportedError

if TYPE_CHECKING:
    from build_worker.backends.base import Builder

_BUILDERS = {
    "fake": "build_worker.backends.fake:FakeBuilder",
    "openvino": "build_worker.backends.openvino:OpenVinoBuilder",
    "tensorrt_llm": "build_worker.backends.tensorrt_llm:TensorRtLlmBuilder",
    "vllm": "build_worker.backends.vllm:VllmBuilder",
}


def load_builder(kind: str) -> Builder:
    """The builder of one engine kind; only its module is imported.

    Raises:
        UnsupportedError: there is no such kind.
    """
    if kind not in _BUILDERS:
        raise UnsupportedError(
            f"no engine kind {kind!r}; there are {', '.join(sorted(_BUILDERS))}", kind=kind
        )
    module, _, name = _BUILDERS[kind].partition(":")
    return cast("Builder", getattr(import_module(module), name)())
