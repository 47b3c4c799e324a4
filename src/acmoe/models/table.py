"""The table of models: one source for `acmoe models` and the README."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from acmoe.models.count import count_parameters
from acmoe.models.registry import build_model, list_models, model_card


class ModelRow(NamedTuple):
    """One model as a reader compares it."""

    name: str
    description: str
    parameters: int
    active_parameters: int  # touched by one token: k of the E experts
    paper: str  # figures the paper reports, "" for models of our own


def model_rows() -> list[ModelRow]:
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
    lines = ["| model | what | parameters | active | the paper |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| `{row.name}` | {row.description} | {row.parameters:,} | {row.active_parameters:,} "
            f"| {row.paper} |"
        )
    return "\n".join(lines)
