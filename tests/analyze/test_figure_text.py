"""Coloured text: every token visible, in its place, on its expert's colour."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from drawn_figures import drawn, outlines, texts, tiles
from matplotlib.colors import to_hex

from acmoe.analyze.figures.attack_changes import save_changed_text
from acmoe.analyze.figures.colored_text import save_colored_text
from acmoe.analyze.figures.palette import expert_colour, faded
from acmoe.analyze.figures.text_cells import COLUMNS, lay_out
from acmoe.analyze.figures.visible import visible


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("a b", "a b"),
        ("\n", "\u23ce"),
        (b"\n", "\u23ce"),
        ("\t", "\u21e5"),
        ("\r", "\\r"),
        (b"\x00", "\\x00"),
        ("\x1b", "\\x1b"),
        (b"\xc3\xa9", "\\xc3\\xa9"),  # bytes are bytes, not half characters
        ("caf\u00e9", "caf\u00e9"),
        ("e\u0301", "e\\u0301"),  # an accent has no column of its own
        ("\u4e2d", "\\u4e2d"),  # not in the font
        ("\U0001f600", "\\U0001f600"),
        ("\ud800", "\\ud800"),  # half of a pair: no file could hold it
        ("\u00a0", "\\xa0"),  # a space that is none
        ("", "\u2205"),
        ("$x_1$", "$x_1$"),
    ],
)
def test_a_token_is_shown_or_written_out(token: str | bytes, shown: str) -> None:
    assert visible(token) == shown


@settings(max_examples=settings.default.max_examples // 3)  # it draws a figure
@given(st.lists(st.text(max_size=90) | st.binary(max_size=30), min_size=1, max_size=20))
def test_every_character_has_a_place_of_its_own_inside_the_page(
    tokens: list[str | bytes],
) -> None:
    page = lay_out(tokens)
    taken = set()
    written = [""] * len(tokens)
    for piece in page.pieces:
        for place in range(piece.stop - piece.start):
            spot = (piece.row, piece.column + place)
            assert spot not in taken
            assert spot[1] < COLUMNS and spot[0] < page.rows
            taken.add(spot)
        written[piece.token] += visible(tokens[piece.token])[piece.start : piece.stop]
    assert written == [visible(token) for token in tokens]


def test_rows_end_at_newlines_and_before_a_token_that_does_not_fit() -> None:
    page = lay_out(["a\n", "b" * 70, "cc", "ddd"])
    # "a" and its sign, then 70 + 2 = 72 columns fill a row, and "ddd" begins the next.
    assert [(piece.row, piece.column) for piece in page.pieces] == [(0, 0), (1, 0), (1, 70), (2, 0)]
    assert page.rows == 3


def test_a_token_longer_than_a_row_goes_on_in_the_next() -> None:
    page = lay_out(["x", "y" * 100, "z"])
    found = [(p.token, p.row, p.column, p.stop - p.start) for p in page.pieces]
    assert found == [(0, 0, 0, 1), (1, 1, 0, 72), (1, 2, 0, 28), (2, 2, 28, 1)]


def test_readings_of_one_page_stand_in_the_same_places() -> None:
    page = lay_out(["a", "b", "c"], ["a", "wide", "\n"], gap=1)
    assert [(p.column, p.stop - p.start) for p in page.pieces] == [(0, 1), (2, 4), (7, 1)]


def test_tiles_have_their_experts_colours_and_the_text_of_their_tokens(tmp_path: Path) -> None:
    tokens = [b"i", b"f", b" ", b"x", b"\n", b"y"]
    experts = [4, 4, 0, 3, 3, 3]
    figure = drawn(
        lambda: save_colored_text(tokens, {"layer 2": experts}, tmp_path, num_experts=5, title="t")
    )
    page, key = figure.axes
    assert [to_hex(tile.get_facecolor()).upper() for tile in tiles(page)] == [
        expert_colour(expert) for expert in experts
    ]
    # A number below the first token of each run, and again at the start of a row; the space is
    # an empty tile.
    assert texts(page) == ["i", "4", "f", "0", "x", "3", "\u23ce", "y", "3"]
    assert texts(figure) == ["t", "layer 2"]
    # 1, 3 and 2 of 6 tokens; experts 1 and 2 have none.
    assert texts(key) == ["0", "16.7%", "3", "50.0%", "4", "33.3%", "no token here: 1, 2"]


def test_one_expert_with_all_tokens_has_all_of_the_share(tmp_path: Path) -> None:
    figure = drawn(
        lambda: save_colored_text("abc", {"a": [0, 0, 0]}, tmp_path, num_experts=1, title="t")
    )
    assert texts(figure.axes[1]) == ["0", "100.0%"]


def test_sixty_four_experts_have_a_key_of_eight_rows(tmp_path: Path) -> None:
    figure = drawn(
        lambda: save_colored_text("x" * 64, {"a": range(64)}, tmp_path, num_experts=64, title="t")
    )
    key = figure.axes[1]
    assert len(tiles(key)) == 64
    assert key.get_ylim() == (8, 0)


def test_pages_stand_below_one_another_inside_the_figure(tmp_path: Path) -> None:
    pages = {"one": [0] * 300, "two": [1] * 300}
    figure = drawn(lambda: save_colored_text("ab" * 150, pages, tmp_path, num_experts=2, title="t"))
    boxes = [axes.get_position() for axes in figure.axes]
    assert all(box.y0 >= 0 and box.y1 <= 1 for box in boxes)
    assert all(low.y1 < high.y0 for high, low in pairwise(boxes))


def test_moved_tokens_are_outlined_in_both_texts_and_replaced_ones_underlined(
    tmp_path: Path,
) -> None:
    texts_ = (["a", "b", "c", "d"], ["a", "X", "c", "d"])
    experts = ([0, 1, 2, 0], [0, 1, 1, 0])
    figure = drawn(lambda: save_changed_text(texts_, experts, tmp_path, num_experts=3, title="t"))
    clean, _, attacked, _ = figure.axes
    for page, moved in ((clean, expert_colour(2)), (attacked, expert_colour(1))):
        assert [box.get_xy() for box in outlines(page)] == [(2, 0)]
        faint = [faded(expert_colour(expert), 0.35) for expert in (0, 1, 0)]
        found = [to_hex(tile.get_facecolor()).upper() for tile in tiles(page)]
        assert found == [faint[0], faint[1], moved, faint[2]]
    assert len(clean.lines) == 0
    (line,) = attacked.lines
    assert np.floor(line.get_xdata()).tolist() == [1, 1]  # below token 1
    assert texts(figure)[1:] == [
        "clean: 1 of 4 tokens moved (outlined)",
        "attacked: 1 replaced (underlined)",
    ]
