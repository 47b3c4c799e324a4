"""Draw clusters in the plane with the lines at which routers decide.

D = 2 features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acmoe.analyze.figures.palette import BLACK, BLUE, ORANGE, RED
from acmoe.lab.theory.gaussians import upper_tail
from acmoe.lab.theory.robustness.dot_product import MEANS, STD, errors, rules
from acmoe.lab.theory.robustness.margins import metric_z
from acmoe.lab.theory.scale import exact_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour, dashes and name of each rule's line.
LOOKS = {
    "plain": (BLACK, "-", r"plain, $h^\top e_k$"),
    "dot product": (RED, "--", r"Eqn. 8, $h^\top M e_k$"),
    "distance": (BLUE, "-.", r"distance in $M$"),
}
CLUSTER_COLOURS = (BLUE, ORANGE)
PAIR = torch.tensor([[0.0, 0.0], [0.9, 1.2]], dtype=torch.float64)


def draw_ellipses(axes: Axes, means_CD: Tensor, std_D: Tensor, names: tuple[str, ...]) -> None:
    """Draw each Gaussian by its ellipses of one and two deviations, and its mean."""
    angle = torch.linspace(0, 2 * torch.pi, 181, dtype=torch.float64)
    circle_TD = torch.stack([angle.cos(), angle.sin()], -1)
    for mean_D, colour, name in zip(means_CD, CLUSTER_COLOURS, names, strict=True):
        for radius, alpha in ((1, 0.30), (2, 0.15)):
            x_TD = mean_D + radius * std_D * circle_TD
            axes.fill(x_TD[:, 0], x_TD[:, 1], color=colour, alpha=alpha, linewidth=0)
        axes.plot(*mean_D.tolist(), "o", color=colour, markeredgecolor=BLACK, markersize=6)
        axes.annotate(name, mean_D.tolist(), xytext=(6, 6), textcoords="offset points")


def draw_line(axes: Axes, normal_D: Tensor, offset: float, name: str, label: str) -> None:
    """Draw the line normal . h + offset = 0 across the axes."""
    colour, dashes, _ = LOOKS[name]
    point = -offset * normal_D / normal_D.square().sum()
    along = torch.stack([-normal_D[1], normal_D[0]]) / normal_D.norm()
    first, second = (point - 20 * along).tolist(), (point + 20 * along).tolist()
    axes.plot(
        [first[0], second[0]],
        [first[1], second[1]],
        color=colour,
        linestyle=dashes,
        linewidth=2,
        label=label,
    )


def draw_dot_product(figure: Figure) -> None:
    """Draw the counterexample to Proposition 1: three rules, and the errors of both clusters."""
    plane, bars = figure.subplots(1, 2, width_ratios=(1.25, 1))
    scale_D = exact_scale(STD)
    draw_ellipses(plane, MEANS, STD, ("a", "b"))
    for name, (normal_D, offset) in rules(scale_D).items():
        draw_line(plane, normal_D, offset.item(), name, LOOKS[name][2])
    for mean_D, colour in zip(MEANS, CLUSTER_COLOURS, strict=True):
        plane.annotate(
            "", mean_D.tolist(), (0, 0), arrowprops={"arrowstyle": "->", "color": colour}
        )
    plane.set(xlim=(-0.6, 3.4), ylim=(-2.4, 4.4), xlabel="tight feature", ylabel="loose feature")
    plane.set_title("Two clusters, embeddings at their means")
    plane.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
    every = errors(scale_D)
    for place, (name, values) in enumerate(every.items()):
        at = [cluster + 0.27 * (place - 1) for cluster in (0, 1)]
        bars.bar(at, values, width=0.25, color=LOOKS[name][0], label=LOOKS[name][2])
        for x, value in zip(at, values, strict=True):
            bars.annotate(f"{value:.3f}", (x, value), ha="center", va="bottom", fontsize=8)
    bars.set_xticks([0, 1], labels=["tokens of a", "tokens of b"])
    bars.set_ylim(0, 0.7)
    bars.set_ylabel("probability of the wrong expert")
    bars.set_title("Errors")


def draw_two_clusters(figure: Figure) -> None:
    """Draw the rule of the proof, as the token sees it and in the space that M stretches."""
    scale_D = exact_scale(STD)
    gap_D, middle_D = PAIR[1] - PAIR[0], PAIR.mean(0)
    for axes, stretch_D, title in zip(
        figure.subplots(1, 2),
        (torch.ones_like(STD), scale_D.sqrt()),
        ("The tokens", r"The tokens times $M^{1/2}$"),
        strict=True,
    ):
        draw_ellipses(axes, PAIR * stretch_D, STD * stretch_D, ("a", "b"))
        for name, metric_D in (("plain", torch.ones_like(STD)), ("distance", scale_D)):
            normal_D = metric_D * gap_D
            error = upper_tail(metric_z(gap_D, STD, metric_D)).item()
            offset = -(normal_D @ middle_D).item()
            label = {"plain": "nearest mean", "distance": r"nearest mean in $M$"}[name]
            draw_line(axes, normal_D / stretch_D, offset, name, f"{label}: error {error:.3f}")
        axes.set(xlim=(-1.2, 2.2), ylim=(-2.2, 4.6), xlabel="tight feature", ylabel="loose feature")
        axes.set_title(title)
        axes.legend(loc="upper left", frameon=True, framealpha=0.9, edgecolor="none")
