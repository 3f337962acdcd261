"""Pieces joined equal the whole, whatever the ids and wherever they are cut (field cases 12, 13, 14)."""

from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.detokenizer import CONTEXT_TOKENS, REPLACEMENT, DetokenizerFactory
from tests.gateway.tokenizers_of_all_kinds import TOKENIZERS

FACTORIES = {kind: DetokenizerFactory(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
BYTES = ["byte level", "byte fallback"]
HARD_TEXT = ["삼겹살", "👩‍👩‍👧 🇩🇪 🏳️‍🌈", "e\u0301 combining", "a😀b"]
FIRST_BYTE_TOKEN = 3


def byte_ids(kind, data):
    return list(data) if kind == "byte level" else [FIRST_BYTE_TOKEN + byte for byte in data]


def pieces(kind, ids, sizes=(1,), prefix=()):
    """The deltas of `ids`, pushed in chunks of the given sizes, the last repeated; then the flush."""
    detokenizer = FACTORIES[kind].start(prefix)
    deltas, start = [], 0
    while start < len(ids):
        size = sizes[min(len(deltas), len(sizes) - 1)]
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
    return deltas, detokenizer.finish()


def joined(kind, ids, sizes=(1,), prefix=()):
    deltas, rest = pieces(kind, ids, sizes, prefix)
    return "".join(deltas) + rest


def whole(kind, ids):
    return TOKENIZERS[kind].decode(ids, skip_special_tokens=True)


def named(kind, *tokens):
    return [TOKENIZERS[kind].token_to_id(token) for token in tokens]


@pytest.mark.parametrize(
    ("kind", "tokens", "text"),
    [
        ("byte fallback", ["▁Hello", "▁world", "!", "▁", "▁Hello"], "Hello world!  Hello"),
        ("metaspace", ["▁beta", "gamma", "▁delta"], "betagamma delta"),
        ("word piece", ["beta", "##gam", "##ma", "delta", "."], "betagamma delta ."),
        ("word end", ["be", "ta</w>", "gamma</w>"], "beta gamma"),
        ("plain", ["beta", "gamma"], "beta gamma"),
    ],
)
def test_words_keep_their_spaces(kind, tokens, text):
    ids = named(kind, *tokens)
    assert joined(kind, ids) == text == whole(kind, ids)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("text", HARD_TEXT)
def test_no_delta_has_half_a_character(kind, text, size):
    deltas, rest = pieces(kind, byte_ids(kind, text.encode()), [size])
    assert not any(REPLACEMENT in piece for piece in [*deltas, rest])
    assert "".join(deltas) + rest == text


@pytest.mark.parametrize("size", [1, 2, 3])
def test_merged_tokens_give_no_half_character(size):
    ids = TOKENIZERS["trained byte level"].encode("삼겹살 😀 👩‍👩‍👧!").ids
    deltas, rest = pieces("trained byte level", ids, [size])
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert "".join(deltas) == "삼겹살 😀 👩‍👩‍👧!"
    assert rest == ""


def test_whole_characters_do_not_wait_for_those_after_them():
    deltas, _ = pieces("byte level", list("ab😀".encode()), [3])
    assert deltas[0] == "ab"


def test_a_run_of_byte_tokens_comes_with_the_token_after_it():
    ids = [*byte_ids("byte fallback", "é\n".encode()), *named("byte fallback", "a")]
    assert pieces("byte fallback", ids) == (["", "", "", "é\na"], "")


@pytest.mark.parametrize("kind", BYTES)
def test_a_truncated_last_character_is_flushed_once(kind):
    ids = [*byte_ids(kind, b"ok "), *byte_ids(kind, "😀".encode()[:-1])]
    detokenizer = FACTORIES[kind].start()
    text = detokenizer.push(ids)
    assert REPLACEMENT not in text
    assert text + detokenizer.finish() == whole(kind, ids)
    assert detokenizer.finish() == ""


def test_bytes_that_turn_out_to_be_no_text_are_as_in_the_whole():
    ids = [*byte_ids("byte fallback", b"\xc3\xa9\xff"), *named("byte fallback", "▁world", "!")]
    assert joined("byte fallback", ids) == whole("byte fallback", ids) == REPLACEMENT * 3 + " world!"


def test_special_and_unknown_ids_give_no_text():
    ids = [1, *named("byte fallback", "▁Hello"), 2, 1 << 20, *named("byte fallback", "▁world"), 2]
    assert joined("byte fallback", ids) == "Hello world"


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8))
@pytest.mark.parametrize("kind", BYTES)
def test_text_comes_out_as_it_was(kind, text, sizes):
    ids = byte_ids(kind, text.encode())
    # Llama's decoder takes away one space at the start.
    expected = text.removeprefix(" ") if kind == "byte fallback" else text
    assert joined(kind, ids, sizes) == expected == whole(kind, ids)


def any_ids(kind, max_size):
    """Ids that a broken model might make, with bytes that nearly are characters, and unknown ids."""
    size = TOKENIZERS[kind].get_vocab_size()
    nearly = st.sampled_from(["é".encode(), "😀".encode(), "😀".encode()[:3], b"\xff", b"\xed\xa0", b"\n"])
    one = st.integers(0, size).map(lambda token: [token])
    some = nearly.map(lambda data: byte_ids(kind, data)) if kind in BYTES else one
    return st.lists(one | some, max_size=max_size).map(lambda lists: list(chain(*lists)))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_joined_deltas_equal_the_whole_decoding_of_any_ids(kind, data, sizes):
    ids = data.draw(any_ids(kind, 40))
    assert joined(kind, ids, sizes) == whole(kind, ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_prefix_is_gone_on_from_where_it_was_left(kind, data, sizes):
    prefix = data.draw(any_ids(kind, 30))
    ids = data.draw(any_ids(kind, 20))
    given_out = "".join(pieces(kind, prefix)[0])
    assert given_out + joined(kind, ids, sizes, prefix) == whole(kind, prefix + ids)


@example(byte=0xFF)
@example(byte=0x80)
@given(byte=st.integers(0x80, 0xFF))
@settings(max_examples=10, deadline=None)
def test_broken_bytes_do_not_pile_up(byte):
    deltas, rest = pieces("byte level", [byte] * 100)
    assert len("".join(deltas)) >= 98
    assert "".join(deltas) + rest == REPLACEMENT * 100


class CountingTokenizer:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, **options)


@pytest.mark.parametrize("token", ["</s>", "<0xFF>", "▁Hello", "▁"])
def test_the_work_for_a_token_does_not_grow_with_the_answer(token):
    tokenizer = CountingTokenizer(TOKENIZERS["byte fallback"])
    detokenizer = DetokenizerFactory(tokenizer).start()
    (token_id,) = named("byte fallback", token)
    for _ in range(2000):
        detokenizer.push([token_id])
    detokenizer.finish()
    assert tokenizer.decoded <= 2000 * 2 * (CONTEXT_TOKENS + 1)
