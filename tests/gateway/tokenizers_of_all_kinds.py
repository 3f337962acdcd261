"""Small tokenizers with every way of decoding that language models use."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.gateway.helpers import byte_fallback_tokenizer, byte_level_tokenizer

TEXT = [
    "삼겹살 먹자, 삼겹살!",
    "a café, two cafés",
    "😀😀 👩‍👩‍👧 🇩🇪",
    "def f(x):\n    return x",
    "beta gamma delta",
]


def trained_byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE with merges within and across characters, like those of GPT, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT * 3,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # Tokens added as plain text: one in the byte alphabet, one with characters outside it.
    tokenizer.add_tokens(["<think>", AddedToken("two words 日", normalized=False)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Spaces as U+2581 and no bytes, as in T5."""
    words = ["<pad>", "</s>", "▁", "▁beta", "▁▁", "gamma", "▁delta", "😀", "é", "\ufffd", "x"]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """Pieces of words, whose decoding tidies punctuation."""
    words = ["[UNK]", "[SEP]", "beta", "##gam", "##ma", "delta", ".", ",", "'", "n't", "do", "😀"]
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}))
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def word_end_tokenizer() -> Tokenizer:
    """Marks where words end, as the first GPT did; the mark of the last word is no space."""
    words = ["<unk>", "be", "ta</w>", "gamma</w>", "x", "</w>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def plain_tokenizer() -> Tokenizer:
    """No decoder at all: words with spaces between."""
    words = ["<unk>", "beta", "gamma", "\ufffd"]
    return Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))


TOKENIZERS = {
    "byte level": byte_level_tokenizer(),
    "trained byte level": trained_byte_level_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "word piece": word_piece_tokenizer(),
    "word end": word_end_tokenizer(),
    "plain": plain_tokenizer(),
}
