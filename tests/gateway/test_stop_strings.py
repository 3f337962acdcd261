"""Stop strings in streamed text (field cases 15, 16, 17, 18)."""

import pytest
from hypothesis import given, settings
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


def first_match(stops, text):
    """Where the first stop string to be complete begins, and which it is; the longest of those."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, minus_length, stop = min(found)
    return end + minus_length, stop


def possible_start(stops, text):
    """The longest end of `text` that is a proper prefix of some stop string."""
    prefixes = {stop[:size] for stop in stops for size in range(len(stop))}
    return next(
        text[place:] for place in range(len(text) + 1) if text[place:] in prefixes or place == len(text)
    )


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=5)
PIECES = st.lists(st.text("ab\nc", max_size=6), max_size=12)


@settings(max_examples=500, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_any_cutting_gives_the_first_match_of_the_whole(stops, pieces):
    text = "".join(pieces)
    out, met = run(stops, pieces)
    match = first_match(stops, text)
    assert ("".join(out), met) == ((text, None) if match is None else (text[: match[0]], match[1]))


@settings(max_examples=500, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(stops, pieces):
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        if stop is not None:
            return
        seen += piece
        out += text
        assert out + possible_start(stops, seen) == seen
    assert out + matcher.finish() == seen


def test_characters_that_mean_something_in_patterns_are_taken_as_they_are():
    for character in "]^-\\[.*\n😀":
        assert run([character + "x"], ["a" + character, "x"]) == (["a", ""], character + "x")


def test_text_held_back_is_not_read_again():
    class Reads(str):
        """Counts the characters that are looked at one by one."""

        __slots__ = ()
        count = 0

        def __getitem__(self, place):
            Reads.count += 1
            return super().__getitem__(place)

    matcher = StopMatcher(["a" * size + "b" for size in range(240, 256)])
    for _ in range(2000):
        matcher.push(Reads("aaaa"))
    assert Reads.count == 8000
