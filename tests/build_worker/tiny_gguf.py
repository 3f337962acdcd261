"""A GGUF model of two layers with random weights: built in seconds, by the same code as a large one."""

from __future__ import annotations

import numpy as np
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS, CONTEXT = 128, 256, 4, 2, 2, 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def write_tiny_gguf(path, *, architecture="llama", seed=1, pre="smollm", extra=None, tensors=()):
    """Writes the model; `extra` are more metadata strings, `tensors` more names of tensors."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(1)
    vocabulary = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(vocabulary) - len(SPECIALS)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    random = np.random.default_rng(seed)

    def add(name, *shape):
        dtype = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(name, (random.standard_normal(shape) * 0.05).astype(dtype))

    add("token_embd.weight", len(vocabulary), HIDDEN)
    add("output_norm.weight", HIDDEN)
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", kv_width, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", kv_width, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED_FORWARD)
    for name in tensors:
        add(name, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
