"""What each kind can do: the table itself, and how values of options are read."""

from __future__ import annotations

import pytest

from mesh.kinds import KINDS, Option, nearest
from mesh.precisions import PRECISIONS

INTEGER = Option("integer", "a count", low=1, high=8)
NUMBER = Option("number", "a share", high=1)
CHOICE = Option("choice", "a colour", choices=("red", "green"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_table_agrees_with_itself(kind):
    assert kind.calibrated <= set(kind.precisions)
    assert set(kind.precisions) - {"none"} <= set(PRECISIONS)
    assert set(kind.speculation) <= {"draft_model", "prompt_lookup", "medusa", "eagle", "lookahead"}
    assert kind.meaning
    if kind.cache_share is not None:
        assert float(kind.options[kind.cache_share.option].default) <= 1
    for option in kind.options.values():
        assert option.meaning
        assert bool(option.choices) == (option.type == "choice")
        if option.default:
            option.value(option.default)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        (INTEGER, "8", 8),
        (NUMBER, "0.25", 0.25),
        (NUMBER, "1", 1.0),
        (CHOICE, "red", "red"),
        (Option("boolean", "x"), "true", True),
        (Option("boolean", "x"), "false", False),
        (Option("text", "x"), "1.50", "1.50"),
    ],
)
def test_option_is_read_as_its_type(option, text, value):
    read = option.value(text)

    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        (INTEGER, "0", "a whole number from 1 to 8, not '0'"),
        (INTEGER, "9", "from 1 to 8"),
        (INTEGER, "2.5", "a whole number"),
        (INTEGER, "many", "a whole number"),
        (NUMBER, "1.1", "a number from 0 to 1"),
        (NUMBER, "nan", "a number from 0 to 1"),
        (NUMBER, "inf", "a number from 0 to 1"),
        (CHOICE, "blue", "one of red, green, not 'blue'"),
        (Option("boolean", "x"), "yes", "one of true, false"),
        (Option("integer", "x"), "9" * 5000, "a whole number"),
    ],
)
def test_option_of_another_type_is_refused(option, text, words):
    with pytest.raises(ValueError, match=words) as caught:
        option.value(text)

    assert len(str(caught.value)) <= 300


def test_hint_names_what_is_near_and_nothing_else():
    assert nearest("openvno", KINDS) == "did you mean openvino? "
    assert nearest("xyz", KINDS) == ""
