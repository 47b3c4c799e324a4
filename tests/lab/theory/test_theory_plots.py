import sys
import xml.etree.ElementTree as ElementTree

import pytest

from acmoe.errors import UserError
from acmoe.lab.theory import plots as theory_plots
from acmoe.lab.theory.conditioning.hessian import Conditioning
from acmoe.lab.theory.geometry import draw_dot_product
from acmoe.lab.theory.plots import (
    draw_conditioning,
    draw_noise,
    draw_repeated,
    save_theory_figures,
)
from acmoe.lab.theory.repeats.blocks import BlockRates
from acmoe.lab.theory.repeats.observed import SweepPoint
from acmoe.lab.theory.robustness.noise_sweep import noise_sweep

pytest.importorskip("matplotlib")

import torch
from matplotlib.figure import Figure

AXES = ("weights", "roots", "misassignment", "repeated", "conditioning")
REPEATED = [
    SweepPoint(contrast=c, wrong={}, repeated=(99, 10), counted=(100, 10), own_versus_plain=0.0)
    for c in (1.0, 8.0)
]
RATES = BlockRates(0.1, 0.1, 0.75, 1.0, 0.0, 0.0)


def few_draws(name: str, seed: int) -> Conditioning:
    values = torch.tensor([2.0, 8.0], dtype=torch.float64)
    return Conditioning(values, values.flip(0), 0.0, 0.0)


@pytest.fixture(scope="module")
def points():
    return noise_sweep(1)


@pytest.fixture
def quick(monkeypatch, points):
    """Replace the measurements, which other tests make, by given points; only draw them."""
    monkeypatch.setattr(theory_plots, "noise_sweep", lambda seed: points)
    monkeypatch.setattr(theory_plots, "drawn_conditioning", few_draws)
    monkeypatch.setattr(theory_plots, "confirmation_sweep", lambda seed, tokens: REPEATED)
    monkeypatch.setattr(theory_plots, "exact", lambda clusters, std_CD: RATES)


NAMES = [*AXES, "dot_product", "two_clusters"]


def test_every_figure_is_drawn_and_named(quick, monkeypatch, tmp_path):
    def draw(paint, folder, name, **options):
        figure = Figure()
        paint(figure.subplots() if name in AXES else figure)
        return (folder / f"{name}.png",)

    monkeypatch.setattr(theory_plots, "write_axes", draw)
    monkeypatch.setattr(theory_plots, "write_figure", draw)
    assert save_theory_figures(tmp_path) == [tmp_path / f"{name}.png" for name in NAMES]


@pytest.mark.slow
def test_each_figure_is_written_twice_and_the_same_for_the_same_seed(quick, tmp_path):
    first = save_theory_figures(tmp_path / "new" / "folder", seed=1)
    assert [path.name for path in first] == [
        f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")
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
    assert labels[0] == "aligned: AC worse in 50%"


def test_the_figure_of_repeated_choices_draws_exact_lines_and_counted_points(quick):
    axes = Figure().subplots()
    draw_repeated(axes, seed=0)
    exact, *_ = axes.get_lines()
    assert set(exact.get_ydata()) == {0.75} and exact.get_xdata()[0] == 1
    (container,) = axes.containers
    assert container.lines[0].get_ydata().tolist() == [0.99, 0.99]


def test_the_lines_of_the_dot_product_pass_where_the_rules_are_undecided():
    figure = Figure()
    draw_dot_product(figure)
    plane, bars = figure.axes
    lines = {line.get_label(): line for line in plane.get_lines() if len(line.get_xdata()) == 2}
    assert len(lines) == 3
    # The distance in M is undecided at the midpoint (1.2, 1.4) of the means; Eqn. 8 at the origin.
    for label, (x, y) in (("distance in $M$", (1.2, 1.4)), (r"Eqn. 8, $h^\top M e_k$", (0, 0))):
        (x0, x1), (y0, y1) = (getattr(lines[label], f"get_{axis}data")() for axis in "xy")
        assert (x1 - x0) * (y - y0) == pytest.approx((y1 - y0) * (x - x0), abs=1e-9)
    heights = [bar.get_height() for bar in bars.patches]
    assert heights == pytest.approx([0.0869, 0.0869, 0.586, 0.0, 0.0059, 0.0059], abs=2e-4)


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
