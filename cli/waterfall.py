"""Draws a trace as a waterfall: one line for each span, its bar where it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from cli.spans import Span, Trace

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue")
_NAME_LIMIT = 34
_FIXED_COLUMNS = 2 + 12 + 2  # the length of a span and the spaces between columns
_SHORTEST_BAR = 20


def print_waterfall(console: Console, trace: Trace) -> None:
    """Prints the trace as wide as the console is, with the moments of its events below."""
    for part in render(trace, console.width, is_ascii=console.options.ascii_only):
        console.print(part, highlight=False, no_wrap=True, soft_wrap=False)


def render(trace: Trace, width: int, *, is_ascii: bool = False) -> list[RenderableType]:
    """The heading, the waterfall and the events of a trace, for a terminal `width` columns wide."""
    services = list(dict.fromkeys(span.service for span in trace.spans))
    colours = {service: _COLOURS[i % len(_COLOURS)] for i, service in enumerate(services)}
    rows = list(_walk(trace))
    names = [_shorten("  " * depth + _short_name(span)) for span, depth in rows]
    bar_width = max(
        _SHORTEST_BAR, width - max(map(len, names)) - max(map(len, services)) - _FIXED_COLUMNS - 2
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("", "", "", Text(_scale(trace, bar_width), style="bright_black"))
    for (span, _), name in zip(rows, names, strict=True):
        colour = "red" if span.is_error else colours[span.service]
        table.add_row(
            Text(span.service, style=colours[span.service]),
            Text(name, style="red" if span.is_error else ""),
            Text(milliseconds(span.duration_ns)),
            Text(draw_bar(trace, span, bar_width, is_ascii=is_ascii), style=colour),
        )
    return [*_heading(trace), table, *_remarks(trace, is_ascii=is_ascii)]


def draw_bar(trace: Trace, span: Span, width: int, *, is_ascii: bool = False) -> str:
    """A span's bar of `width` columns that stand for the whole trace, its events marked on it."""
    full, thin, mark = ("#", "|", "*") if is_ascii else ("█", "▏", "◆")
    begin = _column(trace, span.start_ns, width)
    end = _column(trace, span.end_ns, width)
    cells = [" "] * width
    cells[begin : end + 1] = [full] * (end + 1 - begin)
    if begin == end:
        cells[begin] = thin
    for event in span.events:
        cells[_column(trace, event.time_ns, width)] = mark
    return "".join(cells).rstrip()


def milliseconds(nanoseconds: int) -> str:
    """A length of time in milliseconds, with more digits the shorter it is."""
    value = nanoseconds / 1e6
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"  # noqa: PLR2004 - digits that are worth reading


def _column(trace: Trace, time_ns: int, width: int) -> int:
    share = (time_ns - trace.start_ns) / max(1, trace.end_ns - trace.start_ns)
    return min(width - 1, max(0, int(share * width)))


def _walk(trace: Trace) -> Iterator[tuple[Span, int]]:
    """Every span with its depth, parents before children."""
    waiting = [(root, 0) for root in reversed(trace.roots())]
    while waiting:
        span, depth = waiting.pop()
        yield span, depth
        waiting += [(child, depth + 1) for child in reversed(trace.children(span.span_id))]


def _short_name(span: Span) -> str:
    service, slash, method = span.name.rpartition("/")
    return f"{service.rpartition('.')[2]}{slash}{method}"


def _shorten(name: str) -> str:
    return name if len(name) <= _NAME_LIMIT else name[: _NAME_LIMIT - 1] + "…"


def _scale(trace: Trace, width: int) -> str:
    last = milliseconds(trace.end_ns - trace.start_ns)
    return "0" + last.rjust(width - 1)


def _heading(trace: Trace) -> list[Text]:
    # The call that asks for a build ends long before the build does: look at the longest, not at the first.
    parents = [span for span in trace.spans if trace.children(span.span_id)] or trace.roots()
    longest = max(parents, key=lambda span: span.duration_ns)
    subject = " · ".join(filter(None, [trace.subject, trace.model]))
    below = f"trace {trace.trace_id} · {len(trace.spans)} spans, {trace.coverage(longest):.1%} covered"
    return [Text(subject or _short_name(longest), style="bold"), Text(below, style="bright_black")]


def _remarks(trace: Trace, *, is_ascii: bool) -> list[Text]:
    mark = "*" if is_ascii else "◆"
    events = [
        Text(f"{mark} {event.name} at {milliseconds(event.time_ns - trace.start_ns)}", style="bright_black")
        for span in trace.spans
        for event in span.events
    ]
    errors = [
        Text(f"{_short_name(span)}: {span.message or 'error'}", style="red")
        for span in trace.spans
        if span.is_error
    ]
    return [*events, *errors]
