"""Tokens to the text that a client sees, up to a stop string (field cases 15 to 18)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import DetokenizerFactory
from gateway.output import OutputStream
from tests.gateway.tokenizers_of_all_kinds import TOKENIZERS

FACTORIES = {kind: DetokenizerFactory(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
FIRST_BYTE_TOKEN = 3


def run(kind, stops, chunks):
    """The deltas, and the stop string met."""
    output, deltas = OutputStream(FACTORIES[kind].start(), stops), []
    for ids in chunks:
        text, stop = output.push(ids)
        deltas.append(text)
        if stop is not None:
            return deltas, stop
    text, stop = output.finish()
    return [*deltas, text], stop


def chunks_of(*texts):
    return [list(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("stops", "texts", "deltas", "stop"),
    [
        (["DEFGHIJ"], ["DEF", "G", "HI", "J"], ["", "", "", ""], "DEFGHIJ"),
        (["\nUser:"], ["Hi", "\nUser", ":"], ["Hi", "", ""], "\nUser:"),
        (["STOP"], ["a ST", "x"], ["a ", "STx", ""], None),
        (["STOP"], ["a ST"], ["a ", "ST"], None),
        (["beta gamma"], ["alpha", " beta", " gamma", " delta"], ["alpha", " ", ""], "beta gamma"),
        (["겹"], ["삼겹살"], ["삼"], "겹"),
    ],
)
def test_text_ends_where_the_stop_string_begins(stops, texts, deltas, stop):
    assert run("byte level", stops, chunks_of(*texts)) == (deltas, stop)


def test_a_stop_string_within_a_character_of_many_tokens_is_met():
    tokens = list("삼겹살".encode())
    deltas, stop = run("byte level", ["살"], [[token] for token in tokens])
    assert ("".join(deltas), stop) == ("삼겹", "살")


@pytest.mark.parametrize("stop", ["\n", "\n\n", "é\n"])
def test_a_stop_string_in_bytes_held_back_to_the_end_is_met(stop):
    ids = [FIRST_BYTE_TOKEN + byte for byte in f"a{stop}".encode()]
    assert run("byte fallback", [stop], [[token] for token in ids]) == ([""] * len(ids) + ["a"], stop)


def test_a_half_character_after_a_possible_stop_string_comes_out_in_order():
    deltas, stop = run("byte level", ["ab"], [[*b"xa", 0xF0]])
    assert (deltas, stop) == (["x", "a\ufffd"], None)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab\n 삼😀", max_size=30),
    stops=st.lists(st.text("ab\n 삼", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_the_text_does_not_depend_on_how_tokens_come(text, stops, sizes):
    ids = TOKENIZERS["trained byte level"].encode(text).ids
    chunks, place = [], 0
    while place < len(ids):
        size = sizes[min(len(chunks), len(sizes) - 1)]
        chunks.append(ids[place : place + size])
        place += size
    deltas, stop = run("trained byte level", stops, chunks)
    ends = [(text.find(each) + len(each), -len(each), each) for each in stops if each in text]
    if ends:
        end, minus_length, expected = min(ends)
        assert ("".join(deltas), stop) == (text[: end + minus_length], expected)
    else:
        assert ("".join(deltas), stop) == (text, None)
