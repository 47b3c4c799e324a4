"""Maps of router inputs: every sampled token is a point with the look of its expert."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from drawn_figures import drawn, legend_texts
from matplotlib.colors import to_hex

from acmoe.analyze.figures.palette import expert_colour
from acmoe.analyze.figures.tsne import save_tsne


def clusters(count: int, gap: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Two clusters, `gap` apart on every feature."""
    experts_N = np.arange(count) % 2
    noise_ND = np.random.default_rng(0).normal(size=(count, 4))
    return noise_ND + gap * experts_N[:, None], experts_N


def test_points_have_the_colours_of_their_experts_and_all_are_there(tmp_path: Path) -> None:
    x_ND, experts_N = clusters(40, 8.0)
    figure = drawn(
        lambda: save_tsne({"SMoE": (x_ND, experts_N * 3)}, tmp_path, num_experts=5, title="t")
    )
    (axes,) = figure.axes
    found = {
        to_hex(one.get_facecolor()[0]).upper(): len(one.get_offsets()) for one in axes.collections
    }
    assert found == {expert_colour(0): 20, expert_colour(3): 20}
    assert legend_texts(figure) == ["0", "3"]
    assert figure.legends[0].get_title().get_text() == "expert (no token here: 1, 2, 4)"


def test_the_map_keeps_clusters_that_are_far_apart_apart(tmp_path: Path) -> None:
    figure = drawn(lambda: save_tsne({"a": clusters(40, 50.0)}, tmp_path, num_experts=2, title="t"))
    one, other = (points.get_offsets() for points in figure.axes[0].collections)
    middle = np.array(one).mean(0), np.array(other).mean(0)
    reach = max(
        np.linalg.norm(np.array(points) - m, axis=1).max()
        for points, m in zip((one, other), middle, strict=True)
    )
    assert np.linalg.norm(middle[0] - middle[1]) > 2 * reach


def test_the_title_has_the_silhouette_of_the_features(tmp_path: Path) -> None:
    # Points at 0 and at 1, exactly: within 0, between 1, so (1 - 0) / 1 = 1 for each.
    experts_N = np.arange(12) % 2
    x_ND = experts_N[:, None] * np.ones((1, 3))
    panels = {"tight": (x_ND, experts_N), "one expert": (x_ND, np.zeros(12, np.int64))}
    figure = drawn(lambda: save_tsne(panels, tmp_path, num_experts=2, title="t"))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "tight: silhouette +1.000",
        "one expert: silhouette undefined",
    ]


def test_the_sample_is_drawn_by_its_seed_and_is_the_same_in_every_panel(tmp_path: Path) -> None:
    x_ND, experts_N = clusters(60, 1.0)

    def places(seed: int) -> list[list[list[float]]]:
        panels = {"a": (x_ND, experts_N), "b": (x_ND, experts_N)}
        figure = drawn(
            lambda: save_tsne(panels, tmp_path, num_experts=2, title="t", sample=20, seed=seed)
        )
        return [
            np.concatenate([one.get_offsets() for one in axes.collections]).tolist()
            for axes in figure.axes
        ]

    first, again, other = places(0), places(0), places(2**63 - 1)  # the largest of `analyze`
    assert len(first[0]) == 20
    assert first[0] == first[1]
    assert first == again
    assert first != other


def test_equal_tokens_and_single_features_have_a_map_too(tmp_path: Path) -> None:
    experts_N = np.zeros(9, np.int64)
    panels = {
        "equal": (np.ones((9, 3)), experts_N),
        "one feature": (np.arange(9.0)[:, None], experts_N),
    }
    figure = drawn(lambda: save_tsne(panels, tmp_path, num_experts=1, title="t"))
    for axes in figure.axes:
        assert np.isfinite(axes.collections[0].get_offsets()).all()
