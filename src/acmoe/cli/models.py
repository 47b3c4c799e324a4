"""`acmoe models`: list every model with its size and the paper's figures."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from acmoe.storage.strict_json import json_text


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
        rows = model_rows()
        if self.json:
            print(json_text([row._asdict() for row in rows]))
        elif self.markdown:
            print(markdown_table(rows))
        else:
            table = Table("model", "what", "parameters", "active", "the paper")
            for row in rows:
                table.add_row(
                    row.name,
                    row.description,
                    f"{row.parameters:,}",
                    f"{row.active_parameters:,}",
                    row.paper,
                )
            Console().print(table)
        return 0
