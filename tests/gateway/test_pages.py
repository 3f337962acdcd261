"""Pages of lists."""

import pytest

from gateway.pages import one, page, resource_id
from mesh.errors import InvalidFieldError, NotFoundError

ITEMS = [f"i{number:03}" for number in range(120)]


def all_pages(size):
    token, seen = "", []
    while True:
        shown, token = page(ITEMS, str, size, token)
        seen.append(shown)
        if not token:
            return seen


@pytest.mark.parametrize("size", [0, 1, 50, 60, 120, 121, 1000])
def test_pages_joined_are_the_list(size):
    pages = all_pages(size)
    assert [item for shown in pages for item in shown] == ITEMS
    assert all(len(shown) <= (size or 50) for shown in pages)


def test_a_list_that_grew_shows_nothing_twice():
    shown, token = page(ITEMS[10:], str, 5, "")
    more, _ = page(ITEMS, str, 5, token)
    assert more[0] == ITEMS[15]
    assert shown[-1] == ITEMS[14]


@pytest.mark.parametrize(
    ("size", "token", "field"), [(1001, "", "page_size"), (1, "%", "page_token"), (1, "eHg=", "page_token")]
)
def test_what_is_out_of_range_is_named(size, token, field):
    with pytest.raises(InvalidFieldError) as caught:
        page(ITEMS, str, size, token)
    assert caught.value.field == field


def test_resource_names_are_taken_apart():
    assert resource_id("name", "engines/abc", "engines") == "abc"
    for bad in ("abc", "models/abc", "engines/", ""):
        with pytest.raises(InvalidFieldError):
            resource_id("name", bad, "engines")


def test_one_item_is_found_or_named_as_missing():
    assert one(ITEMS, "item", "i005", str) == "i005"
    with pytest.raises(NotFoundError, match="x"):
        one(ITEMS, "item", "x", str)
