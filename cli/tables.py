"""Listings as a table for people or as JSON for programs."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

DIGEST_LENGTH = 12
WIDTH_OF_FILES = 160
_STEP = 1024


def stdout_console() -> Console:
    """Standard output; wide where it is no terminal, so that files and pipes get whole lines."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_OF_FILES
    return console


def to_json(message: Message) -> dict[str, Any]:
    """A message as protobuf's JSON, with the field names of the proto and every plain field present."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_json(messages: Iterable[Message]) -> None:
    """Prints messages as one JSON list."""
    print(json.dumps([to_json(message) for message in messages], indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], when_empty: str) -> None:
    """Prints a table, or one line if there are no rows. Columns whose name ends with ">" align right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # not markup: details come from elsewhere
    if table.row_count:
        stdout_console().print(table)
    else:
        print(when_empty)


def bare(name: str, *, digest: bool = False) -> str:
    """A resource name without its collection; a digest shortened as people read it."""
    last = name.rpartition("/")[2]
    return last[:DIGEST_LENGTH] if digest else last


def size(count: int) -> str:
    """A number of bytes in the unit that fits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _STEP:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _STEP
    return f"{value:.1f} TiB"


def age(moment: Timestamp) -> str:
    """How long ago that was, in its largest unit; nothing if the moment is unset."""
    if not moment.seconds:
        return ""
    seconds = (datetime.now(timezone.utc) - moment.ToDatetime(timezone.utc)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def enum_word(name: str, prefix: str) -> str:
    """The word of an enum's value for people: WORKER_STATE_READY to "ready"."""
    return name.removeprefix(prefix).replace("_", " ").lower()
