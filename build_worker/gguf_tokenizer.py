"""The tokenizer inside a GGUF file as one of the `tokenizers` library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mesh.errors import InvalidFieldError
from mesh.manifest import TokenizerInfo

if TYPE_CHECKING:
    from build_worker.gguf_model import GgufModel

# llama.cpp's token types.
_CONTROL, _USER_DEFINED = 3, 4

# Qwen2's own, from its tokenizer.json.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(model: GgufModel) -> Tokenizer:
    """A byte-level BPE of the file's vocabulary and merges.

    Raises:
        InvalidFieldError: the file's tokenizer is of another kind, or its word splitting is unknown here.
    """
    family = model.require("tokenizer.ggml.model")
    if family != "gpt2":
        raise InvalidFieldError("spec.source", f"tokenizer model {family!r} is not supported, only 'gpt2'")
    tokens = model.require("tokenizer.ggml.tokens")
    types = model.require("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in model.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    _split_words(tokenizer, model.require("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    if model.get("tokenizer.ggml.add_bos_token", default=False):
        bos = model.require("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def describe_tokenizer(model: GgufModel, chat_template: str) -> TokenizerInfo:
    """What a gateway needs beside the tokenizer; `chat_template` replaces the file's own unless empty."""
    tokens = model.require("tokenizer.ggml.tokens")
    eos = model.require("tokenizer.ggml.eos_token_id")
    bos = model.get("tokenizer.ggml.bos_token_id")
    end_of_turn = model.get("tokenizer.ggml.eot_token_id", eos)
    return TokenizerInfo(
        chat_template=chat_template or model.get("tokenizer.chat_template", ""),
        bos_token="" if bos is None else tokens[bos],
        eos_token=tokens[eos],
        eos_token_ids=tuple(dict.fromkeys((eos, end_of_turn))),
        vocab_size=len(tokens),
    )


def _split_words(tokenizer: Tokenizer, name: str) -> None:
    """The pre-tokeniser by llama.cpp's name for it: those that OpenVINO's GGUF reader knows too."""
    if name == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        raise InvalidFieldError(
            "spec.source", f"word splitting {name!r} is not supported; there are 'smollm' and 'qwen2'"
        )
