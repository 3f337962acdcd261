"""Pieces joined equal the whole, whatever the text and wherever it is cut (field cases 12, 13, 14)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import REPLACEMENT, Detokenizer
from tests.gateway.helpers import byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZERS = {"byte level": byte_level_tokenizer(), "byte fallback": byte_fallback_tokenizer()}


def pieces(tokenizer, ids, sizes):
    """The deltas of `ids`, pushed in chunks of the given sizes, the last repeated; then the flush."""
    detokenizer = Detokenizer(tokenizer)
    deltas, start = [], 0
    while start < len(ids):
        size = sizes[min(len(deltas), len(sizes) - 1)]
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
    return deltas, detokenizer.finish()


def fallback_ids(text):
    return [3 + byte for byte in text.encode()]


def test_words_keep_their_spaces():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.token_to_id(word) for word in ("▁Hello", "▁world", "!", "▁", "▁Hello")]
    deltas, rest = pieces(tokenizer, ids, [1])
    assert "".join(deltas) + rest == tokenizer.decode(ids) == "Hello world!  Hello"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["삼겹살", "👩‍👩‍👧 🇩🇪 🏳️‍🌈", "e\u0301 combining", "a😀b"])
def test_no_delta_has_half_a_character(kind, text, size):
    ids = list(text.encode()) if kind == "byte level" else fallback_ids(text)
    deltas, rest = pieces(TOKENIZERS[kind], ids, [size])
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert "".join(deltas) == text
    assert rest == ""


def test_whole_characters_do_not_wait_for_those_after_them():
    deltas, _ = pieces(TOKENIZERS["byte level"], list("ab😀".encode()), [3])
    assert deltas[0] == "ab"


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("byte level", list("ok 😀".encode()[:-1])),
        ("byte fallback", [259, 260, *fallback_ids("😀")[:-1]]),
    ],
)
def test_a_truncated_last_character_is_flushed_once(kind, ids):
    detokenizer = Detokenizer(TOKENIZERS[kind])
    text = detokenizer.push(ids)
    assert REPLACEMENT not in text
    flushed = detokenizer.finish()
    assert set(flushed) == {REPLACEMENT}
    assert text + flushed == TOKENIZERS[kind].decode(ids)
    assert detokenizer.finish() == ""


def test_special_tokens_give_no_text():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [1, tokenizer.token_to_id("▁Hello"), 2]
    deltas, rest = pieces(tokenizer, ids, [1])
    assert "".join(deltas) + rest == "Hello"


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_joined_deltas_equal_the_whole_decoding_of_text(kind, text, sizes):
    ids = list(text.encode()) if kind == "byte level" else fallback_ids(text)
    deltas, rest = pieces(TOKENIZERS[kind], ids, sizes)
    assert "".join(deltas) + rest == TOKENIZERS[kind].decode(ids)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=24), sizes=st.lists(st.integers(1, 4), min_size=1))
def test_joined_deltas_equal_the_whole_decoding_of_any_bytes(ids, sizes):
    tokenizer = TOKENIZERS["byte level"]
    deltas, rest = pieces(tokenizer, ids, sizes)
    assert "".join(deltas) + rest == tokenizer.decode(ids)
