"""Reads adapters into what the executor takes."""

from tensorrt_llm.contracted import CONTRACT, by_name, contracted


class LoraManager(contracted("LoraManager")):
    """Adapters by their uids."""

    def __init__(self, cpp_peft_cache_manager: object = None) -> None:
        super().__init__(cpp_peft_cache_manager)
        self.cpp_lora_weights: dict[str, object] = {}
        self.cpp_lora_config: dict[str, object] = {}

    def load_from_ckpt(self, *values: object, **named: object) -> list[str]:
        parameters = CONTRACT.method_parameters("LoraManager", "load_from_ckpt")
        given = by_name("load_from_ckpt", parameters, values, named)
        assert given.keys() <= parameters.keys()
        assert given["model_config"] is not None
        for uid, folder in zip(given["uids"], given["model_dirs_or_files"], strict=True):
            self.cpp_lora_weights[uid] = folder
            self.cpp_lora_config[uid] = folder
        return given["uids"]
