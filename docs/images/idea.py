"""Draw docs/images/idea.svg: two clusters, and the boundary between experts before and after M.

    python docs/images/idea.py

The clusters are those of the figure `two-clusters.html` ("The paper's ideal case"): cluster a is
tight on the first feature, cluster b on the second, and each expert's embedding is the mean of its
cluster. Errors are exact: the boundary of a dot product is a straight line, so an error is the tail
of a Gaussian.
"""

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

A, B = np.array([1.5, 0.0]), np.array([0.0, 1.5])  # means of the clusters, embeddings of experts
STD_A, STD_B = np.array([0.4, 1.0]), np.array([1.0, 0.4])
COLOR_A, COLOR_B = "#0072b2", "#d55e00"  # Okabe and Ito's
LIMIT = 3.6


def scale(std: np.ndarray) -> np.ndarray:
    """Return the diagonal of M: 1/s with mean one over the features."""
    weight = 1 / std
    return weight / weight.mean()


def error(
    m: np.ndarray, mean: np.ndarray, std: np.ndarray, own: np.ndarray, other: np.ndarray
) -> float:
    """Return the probability that a token of the cluster prefers the other expert in M."""
    normal = m * (own - other)
    z = normal @ mean / np.linalg.norm(normal * std)
    return 0.5 * math.erfc(z / math.sqrt(2))


def draw_panel(axes: Axes, title: str, m: np.ndarray, caption: str, faded: bool) -> None:
    generator = np.random.default_rng(3)
    for mean, std, color, marker, name in (
        (A, STD_A, COLOR_A, "o", "a"),
        (B, STD_B, COLOR_B, "s", "b"),
    ):
        points = mean + std * generator.standard_normal((60, 2))
        weak = faded and name == "b"
        axes.plot(*points.T, marker, color=color, markersize=4, alpha=0.18 if weak else 0.65, mew=0)
        axes.annotate("", mean, (0, 0), arrowprops={"arrowstyle": "->", "color": color, "lw": 2})
        axes.text(*(mean * 1.06 + 0.08), f"$e_{name}$", color=color, fontsize=13, weight="bold")
    direction = np.array([m[1], m[0]])  # normal (m0, -m1) of the line h'M(e_a - e_b) = 0
    line = np.outer((-9, 9), direction / np.linalg.norm(direction))
    axes.plot(*line.T, color="black", lw=2.2)
    if faded:
        axes.plot([-9, 9], [-9, 9], color="black", lw=1, ls=":")
    axes.set(xlim=(-LIMIT + 1, LIMIT), ylim=(-LIMIT + 1, LIMIT), aspect="equal")
    axes.set(xlabel="feature 1", ylabel="feature 2", xticks=[], yticks=[])
    axes.set_title(title, fontsize=11)
    axes.text(0.5, -0.13, caption, transform=axes.transAxes, ha="center", va="top", fontsize=10)


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "acmoe", "font.family": "DejaVu Sans"})
    figure = Figure(figsize=(8.4, 4.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    m = scale(STD_A)
    before = error(np.ones(2), A, STD_A, A, B)
    after = error(m, A, STD_A, A, B)
    draw_panel(
        left,
        "plain: every feature counts the same",
        np.ones(2),
        f"{before:.1%} of cluster a lies beyond the line,\non the side of expert b",
        faded=False,
    )
    draw_panel(
        right,
        f"rescaled for cluster a: M = ({m[0]:.2f}, {m[1]:.2f})",
        m,
        f"a is tight on feature 1, which now counts more:\n"
        f"{after:.1%} of its tokens lie beyond the line",
        faded=True,
    )
    target = Path(__file__).with_name("idea.svg")
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
    print(f"{target}: error {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
