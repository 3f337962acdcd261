"""Cuts lists into pages (https://google.aip.dev/158)."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, TypeVar

from mesh.errors import InvalidFieldError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

Item = TypeVar("Item")


def page(
    items: Sequence[Item], name_of: Callable[[Item], str], page_size: int, page_token: str
) -> tuple[list[Item], str]:
    """One page of `items` and the token of the next, empty on the last.

    A token holds the name of the last item shown, so that a list that grows meanwhile shows nothing twice.

    Raises:
        InvalidFieldError: page_size or page_token is out of range or was not made here.
    """
    if page_size > MAX_PAGE_SIZE:
        raise InvalidFieldError("page_size", f"at most {MAX_PAGE_SIZE}, not {page_size}", limit=MAX_PAGE_SIZE)
    size = page_size or DEFAULT_PAGE_SIZE
    start = 0
    if page_token:
        last = _decode(page_token)
        names = [name_of(item) for item in items]
        if last not in names:
            raise InvalidFieldError("page_token", "the item it points at is gone; start over")
        start = names.index(last) + 1
    shown = list(items[start : start + size])
    is_last = start + size >= len(items)
    return shown, "" if is_last else base64.urlsafe_b64encode(name_of(shown[-1]).encode()).decode()


def resource_id(field: str, name: str, collection: str) -> str:
    """The id in a resource name such as "engines/abc".

    Raises:
        InvalidFieldError: the name is empty or of another collection.
    """
    head, _, identifier = name.partition("/")
    if head != collection or not identifier:
        raise InvalidFieldError(field, f"must look like {collection}/<id>, not {name!r}")
    return identifier


def one(items: Sequence[Item], kind: str, name: str, name_of: Callable[[Item], str]) -> Item:
    """The item of that name.

    Raises:
        NotFoundError: there is none.
    """
    for item in items:
        if name_of(item) == name:
            return item
    raise NotFoundError(kind, name)


def _decode(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise InvalidFieldError("page_token", "was not made by this service") from error
