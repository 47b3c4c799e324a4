import sys
import xml.etree.ElementTree as ElementTree

import pytest

from acmoe.errors import UserError
from acmoe.lab.theory import plots as theory_plots
from acmoe.lab.theory.hessian import Conditioning
from acmoe.lab.theory.noise_sweep import noise_sweep
from acmoe.lab.theory.plots import draw_conditioning, draw_noise, save_theory_figures

pytest.importorskip("matplotlib")

import torch
from matplotlib.figure import Figure


def few_draws(seed: int) -> Conditioning:
    values = torch.tensor([2.0, 8.0], dtype=torch.float64)
    return Conditioning(values, values.flip(0), 0.0, 0.0)


@pytest.fixture(scope="module")
def points():
    return noise_sweep(1)


@pytest.fixture
def quick(monkeypatch, points):
    """What is measured elsewhere is only drawn here."""
    monkeypatch.setattr(theory_plots, "noise_sweep", lambda seed: points)
    for name in ("aligned_conditioning", "rotated_conditioning", "separated_conditioning"):
        monkeypatch.setattr(theory_plots, name, few_draws)


def test_each_figure_is_written_twice_and_the_same_for_the_same_seed(quick, tmp_path):
    first = save_theory_figures(tmp_path / "new" / "folder", seed=1)
    assert [path.name for path in first] == [
        f"{name}.{kind}"
        for name in ("weights", "roots", "misassignment", "conditioning")
        for kind in ("png", "svg")
    ]
    for path in first:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
    second = save_theory_figures(tmp_path / "again", seed=1)
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))


def test_points_are_the_condition_numbers_and_the_legend_counts_the_worse(quick):
    axes = Figure().subplots()
    draw_conditioning(axes, seed=0)
    assert axes.collections[0].get_offsets().tolist() == [[2.0, 8.0], [8.0, 2.0]]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == "aligned covariance: AC worse in 50%"


def test_the_noise_figure_draws_the_three_routers_and_their_intervals(quick):
    axes = Figure().subplots()
    draw_noise(axes, seed=0)
    assert len(axes.containers) == 3 and all(c.has_yerr for c in axes.containers)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "plain router",
        "AC, scale from clean tokens",
        "AC, scale from the noisy tokens",
    ]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'acmoe\[plots\]'"):
        save_theory_figures(tmp_path)
    assert list(tmp_path.iterdir()) == []
