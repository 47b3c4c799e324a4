"""Legends of experts, and each expert's share of the drawn tokens.

N tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.palette import expert_colour, expert_marker

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_A_ROW = 12  # experts in a row of the key


def shares(experts: NDArray[np.int64], num_experts: int) -> NDArray[np.float64]:
    """Return the percentage of the drawn tokens at each expert, (E,)."""
    count_E = np.bincount(experts.ravel(), minlength=num_experts)
    percent_E: NDArray[np.float64] = 100 * count_E / experts.size
    return percent_E


def unused(drawn: Sequence[NDArray[np.int64]], num_experts: int) -> str:
    """Return a phrase that lists the experts no drawn token chose, empty if there are none."""
    seen = set(np.concatenate([experts.ravel() for experts in drawn]).tolist())
    without = [str(expert) for expert in range(num_experts) if expert not in seen]
    if not without:
        return ""
    if len(without) > 8:
        return f"no token here: {len(without)} of {num_experts} experts"
    return f"no token here: {', '.join(without)}"


def key_height(drawn: Sequence[NDArray[np.int64]]) -> float:
    """Return the height in inches of the legend below the panels."""
    used = len(np.unique(np.concatenate([experts.ravel() for experts in drawn])))
    return 0.45 + 0.2 * -(-used // _A_ROW)


def marker_key(figure: Figure, drawn: Sequence[NDArray[np.int64]], num_experts: int) -> None:
    from matplotlib.lines import Line2D

    def look(expert: int) -> Any:
        return Line2D(
            [],
            [],
            linestyle="none",
            markersize=6,
            marker=expert_marker(expert),
            color=expert_colour(expert),
        )

    _key(figure, drawn, num_experts, look)


def swatch_key(figure: Figure, drawn: Sequence[NDArray[np.int64]], num_experts: int) -> None:
    from matplotlib.patches import Patch

    def look(expert: int) -> Any:
        return Patch(facecolor=expert_colour(expert), edgecolor="black", linewidth=0.4)

    _key(figure, drawn, num_experts, look)


def _key(figure: Figure, drawn: Sequence[NDArray[np.int64]], num_experts: int, look: Any) -> None:
    """Draw a legend below the panels: the experts that occur, and the numbers of the others."""
    seen = np.unique(np.concatenate([experts.ravel() for experts in drawn])).tolist()
    rest = unused(drawn, num_experts)
    figure.legend(
        [look(expert) for expert in seen],
        [str(expert) for expert in seen],
        loc="outside lower center",
        ncols=min(_A_ROW, len(seen)),
        title=f"expert ({rest})" if rest else "expert",
        fontsize=9,
        title_fontsize=9,
        handletextpad=0.2,
        columnspacing=0.9,
        handlelength=1.2,
    )
