"""The table of models that `acmoe models` and docs/reference/models.md show."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from acmoe.models.count import count_parameters
from acmoe.models.registry import build_model, list_models, model_card


class ModelRow(NamedTuple):
    """One row of the table."""

    name: str
    description: str
    parameters: int
    active_parameters: int  # used by one token: k of the E experts
    paper: str  # figures reported in the paper, "" for models that are not in it


def model_rows() -> list[ModelRow]:
    """Return one row per model; parameters are counted on the meta device."""
    rows = []
    for name in list_models():
        card = model_card(name)
        with torch.device("meta"):
            total, active = count_parameters(build_model(card.config))
        figures = ", ".join(f"{router} {figure:g}" for router, figure in card.reported)
        paper = f"{card.metric}: {figures}" if card.metric else ""
        rows.append(ModelRow(name, card.description, total, active, paper))
    return rows


def markdown_table(rows: Sequence[ModelRow]) -> str:
    """Format rows as a Markdown table."""
    lines = ["| model | what | parameters | active | the paper |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| `{row.name}` | {row.description} | {row.parameters:,} | {row.active_parameters:,} "
            f"| {row.paper} |"
        )
    return "\n".join(lines)
