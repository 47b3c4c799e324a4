"""`acmoe models`: list every model with its size and the paper's figures."""

from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from acmoe.storage.strict_json import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from acmoe.models.table import ModelRow

# Characters of a line: the columns of names and numbers take 61, two columns of text the rest.
TABLE_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Models:
    """List every model: layers, parameters (total and active per token), the paper's results."""

    json: bool = False
    """Print the list as JSON."""
    markdown: bool = False
    """Print the list as the Markdown table of docs/reference/models.md."""

    def run(self) -> int:
        from acmoe.errors import check
        from acmoe.models.table import markdown_table, model_rows

        check(not (self.json and self.markdown), "--json and --markdown; give one of them")
        rows, console = model_rows(), Console()
        if self.json:
            print(json_text([row._asdict() for row in rows]))
        elif self.markdown:
            print(markdown_table(rows))
        elif console.width >= TABLE_WIDTH:
            console.print(_table(rows))
        else:
            print("\n".join(_paragraph(row, console.width) for row in rows))
        return 0


def _table(rows: "Sequence[ModelRow]") -> Table:
    table = Table()
    table.add_column("model", no_wrap=True)
    table.add_column("what")
    for number in ("parameters", "active"):
        table.add_column(number, justify="right", no_wrap=True)
    table.add_column("the paper")
    for name, what, parameters, active, paper in rows:
        table.add_row(name, what, f"{parameters:,}", f"{active:,}", paper)
    return table


def _paragraph(row: "ModelRow", width: int) -> str:
    """Return a model's name and sizes, with a line each for what it is and the paper's results."""
    sizes = f"{row.parameters:,} parameters, {row.active_parameters:,} active"
    paper = [f"paper: {row.paper}"] if row.paper else []
    first = fill(f"{row.name}: {sizes}", width, subsequent_indent="    ", break_on_hyphens=False)
    more = (
        fill(text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for text in (row.description, *paper)
    )
    return "\n".join((first, *more))
