"""Draw a text with every token on its expert's colour, one page per router or layer.

N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from acmoe.analyze.figures.canvas import write_figure
from acmoe.analyze.figures.inputs import Numbers, as_experts, check_count
from acmoe.analyze.figures.text_cells import Token, check_tokens, lay_out
from acmoe.analyze.figures.text_pages import TextPages
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_colored_text(
    tokens: Sequence[Token],
    experts: Mapping[str, Numbers],
    folder: Path,
    *,
    num_experts: int,
    title: str,
    gap: int = 0,
    name: str = "colored_text",
) -> tuple[Path, Path]:
    """Draw `tokens` (text or bytes) once per entry of `experts`, which maps headings to choices.

    Each entry holds the first expert of every token, (N,). `gap` is the number of columns between
    tokens: use 1 for words, which bring no space of their own. The key below each page lists each
    expert's share of these tokens.

    >>> # save_colored_text([b"d", b"e", b"f"], {"SMoE": [0, 0, 3]}, folder, num_experts=8, ...)
    """
    check_tokens(tokens, "tokens")
    check_count(len(experts), 4, "pages")
    pages = {
        label: as_experts(choices, f"experts of {label!r}", 1, num_experts)
        for label, choices in experts.items()
    }
    for label, experts_N in pages.items():
        check(
            len(experts_N) == len(tokens),
            f"{label!r} has {len(experts_N)} experts for {len(tokens)} tokens; give one for each",
        )

    def draw(figure: Figure) -> None:
        page, text = lay_out(tokens, gap=gap), TextPages(title)
        for label, experts_N in pages.items():
            text.add_page(label, page, tokens, experts_N, num_experts)
        text.draw(figure)

    return write_figure(draw, folder, name)
