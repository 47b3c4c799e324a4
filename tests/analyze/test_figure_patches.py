"""Patches on images: colours, numbers and outlines are those of the experts."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from drawn_figures import drawn, legend_texts, outlines, texts

from acmoe.analyze.figures.attack_changes import save_changed_patches
from acmoe.analyze.figures.palette import expert_colour, rgb
from acmoe.analyze.figures.patches import save_patches
from slow_cases import mostly_slow


@mostly_slow(
    ("side", "channels"),
    [(1, 1), (4, 3), (7, 1), (1, 3), (4, 1), (7, 3), (14, 1), (14, 3)],
    keep={0, 1, 2},
)
def test_every_patch_has_its_experts_colour_and_number(
    side: int, channels: int, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(side)
    images = torch.rand(2, channels, 3 * side, 4 * side, generator=generator)
    experts = torch.randint(0, 16, (2, side, side), generator=generator)
    figure = drawn(
        lambda: save_patches(images, {"Swin": experts}, tmp_path, num_experts=16, title="t")
    )
    for row in range(2):
        plain, overlay = figure.axes[2 * row : 2 * row + 2]
        wanted = images[row].expand(3, -1, -1).permute(1, 2, 0)
        np.testing.assert_allclose(plain.images[0].get_array(), wanted, atol=1e-7)
        colours = overlay.images[1].get_array()
        for (y, x), expert in np.ndenumerate(experts[row].numpy()):
            np.testing.assert_allclose(colours[y, x, :3], rgb(expert_colour(expert)))
        assert texts(overlay) == [str(expert) for expert in experts[row].flatten().tolist()]
        # A patch is 3 rows by 4 columns of pixels, drawn one by one: three quarters as high.
        assert overlay.get_aspect() == 3 / 4


def test_headings_captions_and_key_say_what_is_what(tmp_path: Path) -> None:
    maps = {"Swin": np.zeros((1, 2, 2), int), "Swin-ACMoE": np.full((1, 4, 4), 2)}
    images = np.full((1, 1, 8, 8), 255, np.uint8)
    figure = drawn(
        lambda: save_patches(images, maps, tmp_path, num_experts=3, title="t", captions=["a bird"])
    )
    assert [axes.get_title() for axes in figure.axes] == ["image", "Swin", "Swin-ACMoE"]
    assert figure.axes[0].get_ylabel() == "a bird"
    assert figure.axes[0].images[0].get_array().min() == 1.0  # bytes of 255 are white
    assert legend_texts(figure) == ["0", "2"]
    assert figure.legends[0].get_title().get_text() == "expert (no token here: 1)"


def test_borders_run_where_neighbours_differ_and_nowhere_else(tmp_path: Path) -> None:
    experts = np.array([[[0, 1], [0, 0]]])
    images = np.zeros((1, 1, 4, 4))
    figure = drawn(lambda: save_patches(images, {"a": experts}, tmp_path, num_experts=2, title="t"))
    (borders,) = figure.axes[1].collections
    found = [segment.tolist() for segment in borders.get_segments()]
    # The 1 at the top right has a neighbour at its left and one below.
    assert found == [[[1, 0], [1, 1]], [[1, 1], [2, 1]]]


def test_all_patches_with_one_expert_have_no_border(tmp_path: Path) -> None:
    figure = drawn(
        lambda: save_patches(
            np.zeros((1, 3, 5, 5)),
            {"a": np.full((1, 5, 5), 63)},
            tmp_path,
            num_experts=64,
            title="t",
        )
    )
    assert figure.axes[1].collections[0].get_segments() == []
    assert figure.legends[0].get_title().get_text() == "expert (no token here: 63 of 64 experts)"


def test_moved_patches_are_outlined_in_both_maps_and_counted(tmp_path: Path) -> None:
    clean, attacked = np.zeros((1, 1, 6, 6)), np.full((1, 1, 6, 6), 1.25)
    before = np.array([[[0, 1, 1], [0, 0, 1]]])
    after = np.array([[[0, 1, 2], [1, 0, 1]]])
    figure = drawn(
        lambda: save_changed_patches(
            (clean, attacked), (before, after), tmp_path, num_experts=3, title="PGD"
        )
    )
    left, right, old, new = figure.axes
    assert left.images[0].get_array().max() == 0.0
    assert right.images[0].get_array().min() == 1.0  # 1.25 is drawn as white
    for axes in (old, new):
        # Row 0 column 2 and row 1 column 0; each box is two lines, black around white.
        corners = [box.get_xy() for box in outlines(axes)]
        assert corners == [(2.07, 0.07)] * 2 + [(0.07, 1.07)] * 2
    assert left.get_ylabel() == "2 of 6 moved"
    assert (texts(old), texts(new)) == (list("011001"), list("012101"))
