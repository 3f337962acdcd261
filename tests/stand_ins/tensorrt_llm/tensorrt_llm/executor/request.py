"""An adapter for a request."""

from pathlib import Path

from tensorrt_llm.contracted import contracted

_LoRARequest = contracted("LoRARequest")


class LoRARequest(_LoRARequest):
    """Its folder must be there."""

    def __init__(
        self, lora_name: str, lora_int_id: int, lora_path: str = "", lora_ckpt_source: str = "hf"
    ) -> None:
        super().__init__(lora_name, lora_int_id, lora_path, lora_ckpt_source)
        if lora_path and not Path(lora_path).exists():
            raise ValueError(f"lora_path ({lora_path}) does not exist.")

    adapter_id = property(lambda self: self.lora_int_id)
    name = property(lambda self: self.lora_name)
    path = property(lambda self: self.lora_path)
