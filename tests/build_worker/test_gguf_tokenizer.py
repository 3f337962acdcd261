"""The tokenizer made from a GGUF file: the same ids as OpenVINO's, and text that survives."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from build_worker.gguf_model import GgufModel
from build_worker.gguf_tokenizer import describe_tokenizer, make_tokenizer
from mesh.errors import InvalidFieldError
from tests.build_worker.tiny_gguf import TEMPLATE, write_tiny_gguf

pytestmark = pytest.mark.openvino

HARD_TEXTS = [
    *("Hello world", "  two spaces", "\n\ndef f(x):\n    return x+1", "It's 12345 o'clock", ""),
    *("<|im_start|>user\nhi<|im_end|>\n", "\t\tTab  ends  ", "x" * 50 + " " * 20 + "y"),
    *("café 日本語 😀👩‍👩‍👧 emoji", "नमस्ते دنيا ", "中文字符测试。", "e\u0301 combining", "삼겹살"),
    *("Ünïcödé — “quotes”…", "\U0001d518\U0001d52b 🏳️‍🌈🇩🇪", "\u200b\ufeff\u00a0"),
]


def test_sample_tokenizer_agrees_with_openvino(smollm2_engine):
    import openvino_genai

    folder, manifest = smollm2_engine
    theirs = openvino_genai.Tokenizer(str(folder))
    ours = Tokenizer.from_file(str(folder / manifest.tokenizer.file))

    for text in HARD_TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text).input_ids.data[0].tolist(), text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_survives(tmp_path, pre, text):
    tokenizer = make_tokenizer(GgufModel(write_tiny_gguf(tmp_path / "m.gguf", pre=pre)))

    decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)

    assert decoded == (text if pre == "smollm" else tokenizer.normalizer.normalize_str(text))


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_words_and_digits_are_split(tmp_path, pre):
    tokenizer = make_tokenizer(GgufModel(write_tiny_gguf(tmp_path / "m.gguf", pre=pre)))

    assert tokenizer.encode("hello world 12").tokens == ["hello", "Ġworld", "Ġ", "1", "2"]


def test_special_tokens_are_whole_and_can_be_left_out(tmp_path):
    tokenizer = make_tokenizer(GgufModel(write_tiny_gguf(tmp_path / "m.gguf")))

    ids = tokenizer.encode("<|im_start|>hello<|im_end|>").ids

    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"


def test_description_names_the_special_tokens(tmp_path):
    model = GgufModel(write_tiny_gguf(tmp_path / "m.gguf"))

    assert describe_tokenizer(model, "").chat_template == TEMPLATE
    assert describe_tokenizer(model, "mine").chat_template == "mine"
    assert describe_tokenizer(model, "").eos_token_ids == (2,)


def test_unknown_word_splitting_is_refused(tmp_path):
    model = GgufModel(write_tiny_gguf(tmp_path / "m.gguf", pre="llama-bpe"))

    with pytest.raises(InvalidFieldError, match="word splitting 'llama-bpe' is not supported"):
        make_tokenizer(model)
