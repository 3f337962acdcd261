"""LoRA adapters of a TensorRT-LLM engine, as its executor takes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from infer_worker.backends.base import RefusedSequenceError

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.manifest import Manifest


class Adapters:
    """Adapters by their names in the model file.

    Args:
        executor: The module tensorrt_llm.bindings.executor.
        manifest: Its option `lora` lists the names.
        folder: Of the engine; trtllm-build has left adapter n in `lora/n`.

    Raises:
        ValueError: the option is no list of names, or an adapter is not there.
    """

    def __init__(self, executor: Any, manifest: Manifest, folder: Path) -> None:
        self._configs: dict[str, Any] = {}
        names = json.loads(manifest.options.get("lora", "[]"))
        if not names:
            return
        from tensorrt_llm.builder import EngineConfig
        from tensorrt_llm.lora_manager import LoraManager
        from tensorrt_llm.runtime.model_runner import _engine_config_to_model_config

        engine_config = EngineConfig.from_json_file(str(folder / "config.json"))
        manager = LoraManager(cpp_peft_cache_manager=None)
        for number, name in enumerate(names):
            place = folder / "lora" / str(number)
            if not place.is_dir():
                raise ValueError(f"the engine has no lora/{number}, which ought to be adapter {name}")
            key = str(number + 1)
            manager.load_from_ckpt(
                [str(place)],
                model_config=_engine_config_to_model_config(engine_config),
                runtime_mapping=None,
                uids=[key],
                ckpt_source="hf",
            )
            # With its weights each time: the executor's cache may have dropped it since the last request.
            self._configs[name] = executor.LoraConfig(
                task_id=number + 1,
                weights=manager.cpp_lora_weights[key],
                config=manager.cpp_lora_config[key],
            )

    def config(self, name: str) -> Any:
        """The LoraConfig of an adapter; None for no name.

        Raises:
            RefusedSequenceError: the engine does not have it.
        """
        if name and name not in self._configs:
            raise RefusedSequenceError(f"sampling.lora: this engine has no adapter {name!r}")
        return self._configs.get(name)
