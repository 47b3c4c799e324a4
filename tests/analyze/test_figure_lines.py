"""Convergence, attack sweeps and instability: lines and bars stand where the numbers are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from drawn_figures import drawn, legend_texts
from matplotlib.colors import to_hex

from acmoe.analyze.draw import _convergence
from acmoe.analyze.figures.convergence import save_curves
from acmoe.analyze.figures.instability import save_instability
from acmoe.analyze.figures.palette import ROUTER_LOOKS
from acmoe.analyze.figures.pgd import save_pgd


def test_each_curve_has_its_values_its_name_and_a_look_of_its_own(tmp_path: Path) -> None:
    curves = {"SMoE": ((10, 20, 30), (5.0, 4.0, 3.5)), "ACMoE": ((10, 20, 30), (5.1, 3.9, 3.6))}
    figure = drawn(lambda: save_curves(curves, tmp_path, metric="bits per byte", title="stdlib"))
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "stdlib"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer step", "bits per byte")
    for line, look, (label, (steps, values)) in zip(
        axes.lines, ROUTER_LOOKS, curves.items(), strict=False
    ):
        assert line.get_label() == label
        assert line.get_xydata().tolist() == [
            list(pair) for pair in zip(steps, values, strict=True)
        ]
        assert (line.get_color(), line.get_marker()) == (look.colour, look.marker)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["SMoE", "ACMoE"]


def test_the_curve_of_a_run_has_the_records_that_hold_its_metric(tmp_path: Path) -> None:
    """A record without it, of another version or written by hand, is left out."""
    steps = {10: {"loss": 1.6}, 20: {"loss": 1.5, "perplexity": 4.5}, 30: {"perplexity": 4.0}}
    records = [{"kind": "valid", "step": step, **figures} for step, figures in steps.items()]
    run: Any = SimpleNamespace(metrics=lambda kind: records)
    (axes,) = drawn(lambda: _convergence(run, tmp_path, "smoe", "text")).axes
    assert axes.get_ylabel() == "validation perplexity"
    assert axes.lines[0].get_xydata().tolist() == [[20, 4.5], [30, 4.0]]


def test_a_long_curve_keeps_its_dashes_in_sight(tmp_path: Path) -> None:
    curve = (range(1200), [1.0] * 1200)
    figure = drawn(lambda: save_curves({"a": curve}, tmp_path, metric="m", title="t"))
    # 1200 points, a mark on every hundredth.
    assert figure.axes[0].lines[0].get_markevery() == 100


def test_a_long_title_is_broken_into_lines(tmp_path: Path) -> None:
    title = "word " * 60
    figure = drawn(lambda: save_curves({"a": ((1,), (1.0,))}, tmp_path, metric="m", title=title))
    lines = figure.axes[0].get_title(loc="left").splitlines()
    # 7 inches take 87 characters; 60 words of 5 are 299.
    assert len(lines) == 4
    assert max(map(len, lines)) <= 87


def test_budgets_are_drawn_in_steps_of_a_pixel_and_marked(tmp_path: Path) -> None:
    sweep = ((0.0, 1 / 255, 4 / 255), (94.0, 80.0, 30.0))
    top5 = ((0.0, 1 / 255, 4 / 255), (100.0, 99.0, 80.0))
    sweeps = {"top-1": {"SMoE": sweep}, "top-5": {"SMoE": top5}}
    figure = drawn(lambda: save_pgd(sweeps, tmp_path, title="PGD"))
    first, second = figure.axes
    np.testing.assert_allclose(first.lines[0].get_xydata(), [[0, 94], [1, 80], [4, 30]])
    np.testing.assert_allclose(second.lines[0].get_ydata(), [100, 99, 80])
    assert [text.get_text() for text in first.get_xticklabels()] == ["0", "1", "4"]
    assert [axes.get_title(loc="left") for axes in (first, second)] == [
        "top-1 accuracy",
        "top-5 accuracy",
    ]
    assert figure.get_supxlabel() == "budget of the attack (1/255 of the pixel range)"
    figure = drawn(lambda: save_pgd(sweeps, tmp_path, title="PGD", space="normalized"))
    assert figure.get_supxlabel() == "budget of the attack (1/255 in normalised pixels)"


def test_bars_are_as_high_as_the_instability_and_carry_the_chance_level(tmp_path: Path) -> None:
    layers = {
        "SMoE": [None, (0.20, 0.25), None, (0.10, 0.15)],
        "ACMoE": [None, (0.18, 0.24), None, None],
    }
    figure = drawn(lambda: save_instability(layers, tmp_path, title="t"))
    (axes,) = figure.axes
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[0.20, 0.10], [0.18]]
    for bars, look, chance, lines in zip(
        axes.containers, ROUTER_LOOKS, ([0.25, 0.15], [0.24]), axes.collections, strict=False
    ):
        assert {to_hex(bar.get_facecolor()).upper() for bar in bars} == {look.colour}
        assert {bar.get_hatch() for bar in bars} == {look.hatch}
        segments = lines.get_segments()
        assert [segment[0, 1] for segment in segments] == chance
        for bar, segment in zip(bars, segments, strict=True):
            middle = bar.get_x() + bar.get_width() / 2
            assert segment[:, 0].mean() == pytest.approx(middle)
    # Layers 1 and 3 have none before them with the same tokens, and no group.
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1 \u2192 2", "3 \u2192 4"]
    assert legend_texts(figure) == ["SMoE", "ACMoE", "chance"]


def test_bars_of_several_routers_stand_side_by_side(tmp_path: Path) -> None:
    layers = {str(n): [None, (0.2, 0.3), (0.2, 0.3)] for n in range(6)}
    figure = drawn(lambda: save_instability(layers, tmp_path, title="t"))
    bars = sorted((b for bars in figure.axes[0].containers for b in bars), key=lambda b: b.get_x())
    ends = [bar.get_x() + bar.get_width() for bar in bars]
    assert all(end < after.get_x() for end, after in zip(ends, bars[1:], strict=False))


def test_a_title_may_be_in_any_script(tmp_path: Path) -> None:
    # Missing glyphs would be a warning, and warnings are errors here.
    png, _ = save_curves({"a": ((1,), (1.0,))}, tmp_path, metric="m", title="run \u4e2d\n$x$")
    assert png.exists()
    figure = drawn(
        lambda: save_curves({"a": ((1,), (1.0,))}, tmp_path, metric="m", title="\u4e2d\n$x$")
    )
    assert figure.axes[0].get_title(loc="left") == "\\u4e2d $x$"
