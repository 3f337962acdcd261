"""Runners by engine kind. docs/builds.md, "Adding a kind", lists what belongs to a new one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mesh.errors import UnsupportedError

if TYPE_CHECKING:
    from infer_worker.backends.base import EngineBackend

_BACKENDS = {
    "fake": "infer_worker.backends.fake:FakeBackend",
    "openvino": "infer_worker.backends.openvino:OpenVinoBackend",
    "tensorrt_llm": "infer_worker.backends.tensorrt_llm:TensorRtLlmBackend",
    "vllm": "infer_worker.backends.vllm:VllmBackend",
}


def backend_class(kind: str) -> type[EngineBackend]:
    """The class that runs engines of a kind; importing it does not import the engine's library.

    Raises:
        UnsupportedError: no backend has this name.
    """
    if kind not in _BACKENDS:
        raise UnsupportedError(
            f"no engine kind {kind!r}; known are {', '.join(sorted(_BACKENDS))}", kind=kind
        )
    module, _, name = _BACKENDS[kind].partition(":")
    backend: type[EngineBackend] = getattr(import_module(module), name)
    return backend
