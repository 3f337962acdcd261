"""Stop strings in streamed text (field cases 15, 16, 17, 18)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopMatcher


def run(stops, pieces):
    """Everything let out, and the stop string met."""
    matcher, out = StopMatcher(stops), []
    for piece in pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, matcher.finish()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (["DEFGHIJ"], ["DEF", "G", "HI", "J"], "", "DEFGHIJ"),
        (["\nUser:"], ["Hi", "\nUser", ":", " more"], "Hi", "\nUser:"),
        (["beta gamma"], ["alpha", " beta", " gamma", " delta"], "alpha ", "beta gamma"),
        (["STOP"], ["a ST", "x"], "a STx", None),
        (["STOP"], ["ends in ST"], "ends in ST", None),
        (["aab"], ["a", "a", "a", "b", "c"], "a", "aab"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["bc", "abc"], ["abc"], "", "abc"),
        ([], ["any", "thing"], "anything", None),
    ],
)
def test_text_up_to_the_stop_string_comes_out(stops, pieces, text, stop):
    out, met = run(stops, pieces)
    assert ("".join(out), met) == (text, stop)


def test_only_a_proper_prefix_is_held_back():
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == ("one", None)
    assert matcher.push("two") == ("\ntwo", None)


def oracle(stops, text):
    """The first stop string to be complete when the text is read a character at a time."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("ab\nc", max_size=6), max_size=8),
)
def test_any_cutting_gives_what_reading_by_character_gives(stops, pieces):
    out, met = run(stops, pieces)
    assert ("".join(out), met) == oracle(stops, "".join(pieces))
