"""Draw the figures of the theory: weights, roots, misassignment, repeated choices, conditioning.

`geometry` draws the two figures of clusters in the plane.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acmoe.analyze.figures.canvas import WIDTH, write_axes, write_figure
from acmoe.analyze.figures.palette import BLACK, BLUE, GREEN, ORANGE, RED
from acmoe.lab.theory.conditioning.draws import drawn_conditioning
from acmoe.lab.theory.geometry import draw_dot_product, draw_two_clusters
from acmoe.lab.theory.intervals import family_z, wilson
from acmoe.lab.theory.repeats.confirmation import CLUSTERS, exact, tight_on
from acmoe.lab.theory.repeats.observed import confirmation_sweep
from acmoe.lab.theory.robustness.noise_sweep import (
    SweepPoint,
    crossing,
    noise_sweep,
    population_curve,
)
from acmoe.lab.theory.weights.roots import phi, real_roots
from acmoe.ops.statistics.optimum import optimal_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_theory_figures(folder: Path, *, seed: int = 0) -> list[Path]:
    """Write each figure as PNG and SVG into `folder`; equal seeds give equal files."""
    drawings: dict[str, Callable[[Axes], None]] = {
        "weights": draw_weights,
        "roots": draw_roots,
        "misassignment": partial(draw_noise, seed=seed),
        "repeated": partial(draw_repeated, seed=seed),
        "conditioning": partial(draw_conditioning, seed=seed),
    }
    planes = {"dot_product": draw_dot_product, "two_clusters": draw_two_clusters}
    size = (1.4 * WIDTH, 4.4)
    return [
        *(
            path
            for name, draw in drawings.items()
            for path in write_axes(draw, folder, name, formulas=True)
        ),
        *(
            path
            for name, paint in planes.items()
            for path in write_figure(paint, folder, name, size=size, formulas=True)
        ),
    ]


def draw_weights(axes: Axes) -> None:
    """Draw the optimal weights of Theorem 1 against lambda, for one example."""
    dispersion_D = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    strengths = torch.logspace(-2.5, 2.5, 301, dtype=torch.float64)
    weights_XD = optimal_weights(dispersion_D.expand(len(strengths), -1), strengths[:, None])
    harmonic = 1 / (1 / dispersion_D).mean().item()
    lines = zip((BLUE, GREEN, ORANGE, RED), ("-", "--", "-.", ":"), strict=True)
    for (colour, dashes), s, weight_X in zip(lines, dispersion_D, weights_XD.T, strict=True):
        label = f"s = {s.item():g}"
        axes.plot(strengths, weight_X, color=colour, linestyle=dashes, linewidth=2, label=label)
    axes.axvline(harmonic, color=BLACK, linewidth=0.8)
    axes.annotate(
        "harmonic mean of s:\nw proportional to 1/s",
        (harmonic, 0.80),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
    )
    axes.annotate("uniform, 1/4", (strengths[-1].item(), 0.265), ha="right", va="bottom")
    axes.set_xscale("log")
    axes.set_ylim(-0.02, 1.02)
    axes.set(xlabel=r"regularisation strength $\lambda$ (units of s)", ylabel="feature weight w")
    axes.set_title(r"Theorem 1: optimal feature weights against $\lambda$")
    axes.legend(title="dispersion", loc="upper right")


def draw_roots(axes: Axes) -> None:
    """Draw phi between its poles and mark its roots, for one example."""
    dispersion_D, strength = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), 3.0
    poles = sorted((-dispersion_D).tolist())
    edges = [-6.0, *poles, 4.0]
    for left, right in itertools.pairwise(edges):
        alpha = torch.linspace(left + 1e-3, right - 1e-3, 600, dtype=torch.float64)
        axes.plot(alpha, phi(alpha, dispersion_D, strength), color=BLUE, linewidth=2)
    for pole in poles:
        label = r"poles, $\alpha = -s_q$" if pole == poles[0] else None
        axes.axvline(pole, color=BLACK, linestyle=":", linewidth=1.2, label=label)
    axes.axhline(0, color=BLACK, linewidth=0.9)
    roots = real_roots(dispersion_D, strength).tolist()
    zeros = [0.0] * (len(roots) - 1)
    marker: dict[str, Any] = {"s": 70, "zorder": 3, "edgecolor": BLACK}
    axes.scatter(roots[:-1], zeros, color="white", label="roots with a negative weight", **marker)
    axes.scatter(
        roots[-1:], [0.0], color=ORANGE, label=rf"the optimum, $\alpha$ = {roots[-1]:.3f}", **marker
    )
    axes.set_xticks([-6, *poles, 0, 2, 4])
    axes.set_xlim(-6, 4)
    axes.set_ylim(-4, 4)
    axes.set(
        xlabel=r"$\alpha$ (units of s)",
        ylabel=r"$\varphi(\alpha) = \sum_q 1/(s_q + \alpha) - d/\lambda$ (1 / units of s)",
    )
    axes.set_title(r"The equation for $\alpha$: s = (1, 2, 4), $\lambda$ = 3")
    axes.legend(loc="upper right", framealpha=1, frameon=True, edgecolor="none")


def draw_noise(axes: Axes, seed: int) -> None:
    """Draw Proposition 1: closed forms as lines, Monte Carlo with intervals as points."""
    looks = {
        "plain": (BLACK, "-", "o", "plain router"),
        "clean": (RED, "--", "s", "AC, scale from clean tokens"),
        "noisy": (BLUE, "-.", "^", "AC, scale from the noisy tokens"),
    }
    points = noise_sweep(seed)
    levels = torch.linspace(0, max(point.noise for point in points), 121).tolist()
    for router, (colour, dashes, marker, label) in looks.items():
        curve = [population_curve(router, noise) for noise in levels]
        axes.plot(levels, curve, color=colour, linestyle=dashes, linewidth=1.8)
        own = [point for point in points if point.router == router]
        _draw_rates(axes, own, color=colour, marker=marker, linestyle=dashes, label=label)
    cross = crossing()
    axes.plot([cross, cross], [0, population_curve("plain", cross)], color=BLACK, linewidth=0.8)
    axes.annotate(
        f"crossing at {cross:.2f}: beyond it a clean\nscale errs more than no scale",
        (cross, 0.10),
        xytext=(6, 0),
        textcoords="offset points",
    )
    z = family_z(len(points))
    note = f"lines: closed form; points: Monte Carlo,\nWilson intervals at z = {z:.1f}"
    axes.annotate(note, (0.99, 0.03), xycoords="axes fraction", ha="right", fontsize=9)
    axes.set_ylim(0, 0.42)
    axes.set(
        xlabel="standard deviation of the noise (units of the loose deviation)",
        ylabel="probability of the wrong cluster",
    )
    axes.set_title("Proposition 1: misassignment under noise")
    axes.legend(loc="upper left")


def _draw_rates(axes: Axes, points: Sequence[SweepPoint], **style: Any) -> None:
    """Draw measured rates with their intervals; only the legend shows the line style."""
    below = [point.rate - point.low for point in points]
    above = [point.high - point.rate for point in points]
    axes.errorbar(
        [point.noise for point in points],
        [point.rate for point in points],
        yerr=(below, above),
        markersize=5,
        capsize=3,
        elinewidth=1,
        **style,
    ).lines[0].set_linestyle("none")


def draw_repeated(axes: Axes, seed: int) -> None:
    """Draw the share of wrong choices that Eqn. 8 repeats against the contrast.

    Lines are exact, with the true scale; points are counted, with a scale measured on the choice.
    """
    looks = {
        "own block": (BLUE, "-", "tight on its own block"),
        "next block": (ORANGE, "--", "tight on the block of one other"),
        "other blocks": (RED, "-.", "tight on all blocks but its own"),
    }
    contrasts = torch.logspace(0, 5, 21, base=2, dtype=torch.float64).tolist()
    for name, (colour, dashes, label) in looks.items():
        shares = []
        for contrast in contrasts:
            clusters = replace(CLUSTERS, contrast=contrast)
            shares.append(exact(clusters, tight_on(clusters)[name]).repeated_wrong)
        axes.plot(contrasts, shares, color=colour, linestyle=dashes, linewidth=2, label=label)
    points = confirmation_sweep(seed, 20_000)
    shares = [point.repeated[0] / point.counted[0] for point in points]
    ends = [wilson(point.repeated[0], point.counted[0], 1.96) for point in points]
    axes.errorbar(
        [point.contrast for point in points],
        shares,
        yerr=(
            [max(0.0, share - low) for share, (low, _) in zip(shares, ends, strict=True)],
            [max(0.0, high - share) for share, (_, high) in zip(shares, ends, strict=True)],
        ),
        fmt="o",
        color=BLACK,
        capsize=3,
        label="own block, scale measured on the plain choice",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
    axes.set_ylim(0.0, 1.05)
    axes.set(
        xlabel="contrast: loose over tight deviation", ylabel="wrong choices that are repeated"
    )
    axes.set_title("Eqn. 8 on its own assignment: 4 clusters, separation 3")
    axes.legend(loc="lower left")


def draw_conditioning(axes: Axes, seed: int) -> None:
    """Draw Proposition 2: below the diagonal the AC router is better conditioned."""
    looks = (
        ("aligned", BLUE, "o"),
        ("rotated", ORANGE, "^"),
        ("nearly isotropic", GREEN, "D"),
        ("aligned, variance", RED, "s"),
    )
    largest = 1.0
    for name, colour, marker in looks:
        result = drawn_conditioning(name, seed)
        worse = (result.adaptive > result.plain).double().mean().item()
        axes.scatter(
            result.plain,
            result.adaptive,
            s=22,
            color=colour,
            marker=marker,
            alpha=0.75,
            linewidth=0.4,
            edgecolor="white",
            label=f"{name}: AC worse in {worse:.0%}",
        )
        largest = max(largest, result.plain.max().item(), result.adaptive.max().item())
    axes.plot([1, 2 * largest], [1, 2 * largest], color=BLACK, linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=(1, 1.3 * largest), ylim=(1, 1.3 * largest))
    axes.set(
        xlabel="condition number of the Hessian, plain router",
        ylabel="condition number, AC router",
    )
    axes.set_title("Proposition 2: one point per draw; below the line AC is better")
    axes.legend(loc="upper left")
