"""A Llama of two layers in the hub's form with random weights, a LoRA for it, and what both compute."""

from __future__ import annotations

import json
import math

import numpy as np
from safetensors.numpy import save_file

from build_worker.gguf_model import GgufModel
from build_worker.gguf_tokenizer import make_tokenizer
from tests.build_worker.tiny_gguf import (
    CONTEXT,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    write_tiny_gguf,
)

HEAD = HIDDEN // HEADS
BASE, EPSILON = 10_000.0, 1e-5
RANK, ALPHA = 4, 16.0
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPSILON,
    "rope_theta": BASE,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
    "mlp.up_proj": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED_FORWARD),
}


def write_tiny_hub(folder, *, seed=1, scale=0.08, parts=1, **config):
    """Writes the model into `parts` files and returns its weights; `config` is put into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder.parent / f"{folder.name}-tokenizer.gguf"
    tokenizer = make_tokenizer(GgufModel(write_tiny_gguf(gguf)))
    gguf.unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    config = {**CONFIG, "vocab_size": vocab, **config}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)

    def matrix(*shape):
        return (random.standard_normal(shape) * scale).astype(np.float16)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN) * 4,
        "model.norm.weight": 1 + matrix(HIDDEN),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[f"{prefix}input_layernorm.weight"] = 1 + matrix(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = 1 + matrix(HIDDEN)
        weights |= {f"{prefix}{module}.weight": matrix(*shape) for module, shape in MODULES.items()}
    names = sorted(weights)
    for part in range(parts):
        save_file(
            {name: weights[name] for name in names[part::parts]},
            folder / f"model-{part}-of-{parts}.safetensors",
        )
    return weights


def write_tiny_lora(folder, *, seed=2, modules=("self_attn.q_proj", "self_attn.v_proj"), **config):
    """Writes an adapter as PEFT does and returns its matrices; `config` is put into adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(modules),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            rows, columns = MODULES[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (
                random.standard_normal((RANK, columns)).astype(np.float32) * 0.1
            )
            tensors[f"{name}.lora_B.weight"] = random.standard_normal((rows, RANK)).astype(np.float32) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def merged(weights, lora):
    """The weights with the adapter in them, in half precision."""
    result = dict(weights)
    for name in lora:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            own = f"{module.removeprefix('base_model.model.')}.weight"
            delta = ALPHA / RANK * lora[f"{module}.lora_B.weight"] @ lora[name]
            result[own] = (weights[own].astype(np.float32) + delta).astype(np.float16)
    return result


def logits(weights, ids):
    """What the model computes, by the formulas of the Llama paper; the logits of each position."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    positions = np.arange(len(ids))
    angles = positions[:, None] / BASE ** (np.arange(0, HEAD, 2) / HEAD)
    cos, sin = (np.concatenate([part, part], axis=1) for part in (np.cos(angles), np.sin(angles)))
    mask = np.where(positions[:, None] >= positions[None], 0, -np.inf)
    for layer in range(LAYERS):
        own = {module: w[f"model.layers.{layer}.{module}.weight"] for module in MODULES}
        h = _norm(x, w[f"model.layers.{layer}.input_layernorm.weight"])
        q = _rotate(_heads(h @ own["self_attn.q_proj"].T, HEADS), cos, sin)
        k = _rotate(_heads(h @ own["self_attn.k_proj"].T, KV_HEADS), cos, sin)
        v = _heads(h @ own["self_attn.v_proj"].T, KV_HEADS)
        k, v = (np.repeat(part, HEADS // KV_HEADS, axis=0) for part in (k, v))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(HEAD) + mask
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        attended = shares / shares.sum(axis=2, keepdims=True) @ v
        x = x + attended.swapaxes(0, 1).reshape(len(ids), -1) @ own["self_attn.o_proj"].T
        h = _norm(x, w[f"model.layers.{layer}.post_attention_layernorm.weight"])
        gate = h @ own["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _norm(x, w["model.norm.weight"]) @ head.T


def greedy(weights, ids, count):
    """The ids that follow, each the most likely one."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits(weights, ids)[-1].argmax()))
    return ids[-count:]


def _norm(x, weight):
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * weight


def _heads(x, count):
    return x.reshape(len(x), count, HEAD).swapaxes(0, 1)


def _rotate(x, cos, sin):
    first, second = np.split(x, 2, axis=2)
    return x * cos + np.concatenate([-second, first], axis=2) * sin


def weights_of_gguf(path):
    """The weights of a GGUF file by the hub's names, queries and keys in the hub's order."""
    from gguf import GGUFReader

    from build_worker.gguf_names import hub_module

    weights = {}
    for tensor in GGUFReader(path).tensors:
        module, _, kind = tensor.name.rpartition(".")
        values = np.array(tensor.data)
        if module.endswith(("attn_q", "attn_k")):
            count = HEADS if module.endswith("q") else KV_HEADS
            pairs = values.reshape(count, HEAD // 2, 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[f"{hub_module(module)}.{kind}"] = values
    return weights
