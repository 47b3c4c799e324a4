"""Format reports as tables for the terminal, whose lines break at blanks, not inside words."""

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from rich import box
from rich.table import Table
from rich.text import Text

from acmoe.lab.bench.harness.results import Report, software
from acmoe.lab.bench.harness.table import cells, columns_of

Row = Sequence[str]


def terminal_tables(report: Report, width: int) -> list[Table]:
    """Return the report as tables of at most `width` characters a line.

    It is one table with lines between the columns, or, if that is too wide, without them. If that
    is too wide as well, each value of the first column, such as a shape, has a table of its own.
    """
    title = f"{report.kind}: {report.environment['device']}, {software(report)}"
    headings, rows = [column.heading for column in columns_of(report)], cells(report)
    table = _fitting(title, headings, rows, width)
    if table is not None:
        return [table]
    first, *others = headings
    return [
        whole_word_table(f"{title}; {first} {value}", others, [row[1:] for row in group], width)
        for value, group in groupby(rows, key=lambda row: row[0])
    ]


def whole_word_table(title: str, headings: Row, rows: Sequence[Row], width: int) -> Table:
    """Return a table whose words are broken only if it could not be narrow enough otherwise."""
    table = _fitting(title, headings, rows, width)
    if table is not None:
        return table
    table = Table(title=title)
    for heading in headings:
        table.add_column(Text(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _fitting(title: str, headings: Row, rows: Sequence[Row], width: int) -> Table | None:
    """Return a table that breaks no word, with or without lines; None if it would be too wide."""
    lined = Table(title=Text(title))
    bare = Table(title=Text(title), box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    columns = len(headings)
    # Lined: a line and two blanks for each column, and a last line. Bare: blanks between columns.
    for table, between in ((lined, 3 * columns + 1), (bare, columns - 1)):
        widths = _widths([headings, *rows], width - between)
        if widths is None:
            continue
        for heading, limit in zip(headings, widths, strict=True):
            table.add_column(Text(_wrapped(heading, limit)), no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, map(_wrapped, row, widths)))
        return table
    return None


def _widths(rows: Sequence[Row], total: int) -> list[int] | None:
    """Return widths of columns that sum to at most `total`, none below the column's longest word.

    The widest column that can be narrowed loses a character until all fit; None if they cannot.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [
        max(len(word) for cell in column for word in cell.split() or [""]) for column in columns
    ]
    while sum(widths) > total:
        wide = [number for number, width in enumerate(widths) if width > least[number]]
        if not wide:
            return None
        widths[max(wide, key=lambda number: widths[number])] -= 1
    return widths


def _wrapped(text: str, width: int) -> str:
    """Break a text into lines of at most `width` characters, at blanks."""
    return "\n".join(wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False))
