"""Models with random weights, in the shapes of known ones: speed does not depend on what weights say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
}
SHARD_LAYERS = 8
_DEVIATION = 0.02


def make_model(name: str, folder: Path) -> None:
    """Writes configuration, tokenizer and weights, laid out as on the Hugging Face hub."""
    import torch  # noqa: PLC0415 - seconds
    from safetensors.torch import save_file  # noqa: PLC0415 - see above
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - see above

    folder.mkdir(parents=True)
    config = SHAPES[name]
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{at}": at for at in range(3, config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    kind = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(marks | kind))
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places: dict[str, str] = {}
    for number, names in enumerate(_shards(config)):
        tensors = {
            name: (
                torch.ones(shape, dtype=torch.bfloat16)
                if len(shape) == 1
                else (torch.randn(shape, device=device) * _DEVIATION).to(torch.bfloat16).cpu()
            )
            for name, shape in names.items()
        }
        file = f"model-{number:05}.safetensors"
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _shards(config: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each file."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    head = hidden // config["num_attention_heads"]
    key_value, inner = config["num_key_value_heads"] * head, config["intermediate_size"]
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    shards = [ends]
    for layer in range(config["num_hidden_layers"]):
        if layer % SHARD_LAYERS == 0:
            shards.append({})
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shards[-1] |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return shards
