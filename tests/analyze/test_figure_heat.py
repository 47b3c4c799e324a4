"""Heat maps: the colour of a cell is its number, and the margins are made of the same numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from drawn_figures import drawn, texts

from acmoe.analyze.figures.load import save_load
from acmoe.analyze.figures.scale_map import save_scale_map


def test_the_colour_of_a_load_is_its_octave_above_the_even_share(tmp_path: Path) -> None:
    # With 16 tokens and 4 experts the even share is 4: 8, 4, 2 and 2 are 1, 0, -1, -1 octaves.
    figure = drawn(lambda: save_load({"SMoE": [[8, 4, 2, 2]]}, tmp_path, title="t"))
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[1, 0, -1, -1]]
    # Shares 50, 25, 12.5, 12.5; variance (625 + 0 + 2 * 156.25) / 4 =
    # 234.375, whose root is 15.3.
    assert texts(axes) == ["50.0", "25.0", "12.5", "12.5", "\u00b1 15.3"]
    assert axes.get_title(loc="left") == "SMoE"


def test_an_expert_without_a_token_is_crossed_out_at_the_end_of_the_colours(tmp_path: Path) -> None:
    figure = drawn(lambda: save_load({"a": [[0, 1]]}, tmp_path, title="t"))
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[-3, 1]]
    assert texts(axes)[:2] == ["\u00d7", "100.0"]


def test_a_single_expert_has_the_even_share(tmp_path: Path) -> None:
    figure = drawn(lambda: save_load({"a": [[7]], "b": [[2]]}, tmp_path, title="t"))
    for axes in figure.axes[:2]:
        assert axes.images[0].get_array().tolist() == [[0]]
        assert texts(axes) == ["100.0", "\u00b1 0.0"]


def test_sixty_four_experts_keep_their_crosses_and_drop_their_numbers(tmp_path: Path) -> None:
    load_ME = np.ones((2, 64))
    load_ME[1, 5] = 0
    figure = drawn(lambda: save_load({"a": load_ME}, tmp_path, title="t"))
    # Layer 2: one share of 0 and 63 of 100/63 = 1.5873 around the mean of 100/64 = 1.5625 have the
    # variance (1.5625^2 + 63 * 0.0248^2) / 64 = 0.0388, whose root is 0.2.
    assert texts(figure.axes[0]) == ["\u00d7", "\u00b1 0.0", "\u00b1 0.2"]


def test_features_are_sorted_by_what_clusters_share_and_coloured_by_octaves(tmp_path: Path) -> None:
    scale_CD = torch.tensor([[1.0, 4.0, 0.5], [1.0, 1.0, 2.0]])
    # log2 M is [[0, 2, -1], [0, 0, 1]]; its means over clusters are 0, 1, 0: feature 1 comes first,
    # then 0 and 2 in their own order.
    figure = drawn(lambda: save_scale_map(scale_CD, tmp_path, title="t"))
    common, empty, heat, distance = figure.axes[:4]
    image = heat.images[0]
    assert image.get_array().tolist() == [[2, 0, -1], [0, 0, 1]]
    assert image.get_clim() == (-2, 2)
    (line,) = (line for line in common.lines if line.get_label() == "common part")
    assert line.get_ydata().tolist() == [1, 0, 0]
    assert not empty.axison
    # Roots of (4 + 0 + 1) / 3 and of (0 + 0 + 1) / 3.
    widths = [bar.get_width() for bar in distance.patches]
    np.testing.assert_allclose(widths, [np.sqrt(5 / 3), np.sqrt(1 / 3)])


def test_the_identity_is_the_middle_of_the_colours(tmp_path: Path) -> None:
    figure = drawn(lambda: save_scale_map(np.ones((1, 1)), tmp_path, title="t"))
    image = figure.axes[2].images[0]
    assert image.get_array().tolist() == [[0]]
    low, high = image.get_clim()
    assert low == -high < 0


def test_rows_carry_the_numbers_of_the_clusters_that_are_left(tmp_path: Path) -> None:
    scale_CD = np.ones((3, 2))
    figure = drawn(lambda: save_scale_map(scale_CD, tmp_path, title="t", clusters=[0, 5, 7]))
    assert [text.get_text() for text in figure.axes[2].get_yticklabels()] == ["0", "5", "7"]


def test_sixty_four_clusters_are_numbered_with_room_between(tmp_path: Path) -> None:
    figure = drawn(lambda: save_scale_map(np.ones((64, 8)), tmp_path, title="t"))
    labels = [text.get_text() for text in figure.axes[2].get_yticklabels()]
    assert labels == [str(cluster) for cluster in range(0, 64, 4)]
