"""Draw t-SNE maps of router inputs, coloured by expert, side by side.

N tokens, D features, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.canvas import WIDTH, set_heading, write_figure
from acmoe.analyze.figures.inputs import Numbers, as_array, as_experts, check_count
from acmoe.analyze.figures.key import key_height, marker_key
from acmoe.analyze.figures.palette import expert_colour, expert_marker
from acmoe.errors import UserError, check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_tsne(
    panels: Mapping[str, tuple[Numbers, Numbers]],
    folder: Path,
    *,
    num_experts: int,
    title: str,
    sample: int = 600,
    seed: int = 0,
    name: str = "tsne",
) -> tuple[Path, Path]:
    """Draw one map per panel. A panel holds router inputs (N, D) and first choices (N,).

    `sample` tokens are drawn with `seed`, the same rows in panels of equal N. The silhouette in a
    panel's title is computed from all features of those tokens, not from the map.

    >>> # save_tsne({"SMoE": (layer.scaled_ND, layer.first_N)}, folder, num_experts=8, title="...")
    """
    check_count(len(panels), 4, "panels")
    check(sample >= 8, f"sample={sample}; a map needs at least 8 tokens")
    sampled = {
        label: _sampled(label, features, experts, num_experts, sample, seed)
        for label, (features, experts) in panels.items()
    }
    drawn = [experts_N for _, experts_N in sampled.values()]

    def draw(figure: Figure) -> None:
        columns = min(2, len(sampled))
        grid = list(figure.subplots(-(-len(sampled) // columns), columns, squeeze=False).flat)
        for axes, (label, (x_ND, experts_N)) in zip(grid, sampled.items(), strict=False):
            _panel(axes, _mapped(x_ND, seed), experts_N)
            axes.set_title(f"{label}: silhouette {_silhouette(x_ND, experts_N)}", fontsize=10)
        for axes in grid[len(sampled) :]:
            axes.set_axis_off()
        marker_key(figure, drawn, num_experts)
        set_heading(figure, title)

    height = 0.4 + 3.5 * -(-len(sampled) // 2) + key_height(drawn)
    return write_figure(draw, folder, name, size=(WIDTH, height))


def _sampled(
    label: str, features: Numbers, experts: Numbers, num_experts: int, sample: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Draw `sample` rows, kept in their order. Panels with equal N get the same rows."""
    x_ND = as_array(features, f"features of {label!r}", 2).astype(np.float64)
    experts_N = as_experts(experts, f"experts of {label!r}", 1, num_experts)
    check(
        len(x_ND) == len(experts_N) >= 8,
        f"{label!r} has {len(x_ND)} features and {len(experts_N)} experts; give 8 or more, "
        "one of each a token",
    )
    drawn = np.sort(np.random.default_rng(seed).permutation(len(x_ND))[:sample])
    return x_ND[drawn], experts_N[drawn]


def _mapped(x_ND: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return the t-SNE coordinates of the tokens, (N, 2)."""
    try:
        from sklearn.manifold import TSNE
        from sklearn.utils.parallel import ThreadpoolController
    except ImportError as error:
        raise UserError("figures need the plots extra: pip install 'acmoe[plots]'") from error
    tsne = TSNE(
        init=_principal_plane(x_ND),
        perplexity=min(30.0, (len(x_ND) - 1) / 3),
        random_state=seed % 2**32,  # the seeds that it takes
    )
    # Several threads would add partial sums in varying order, and t-SNE amplifies the last bit.
    with ThreadpoolController().limit(limits=1):
        places_N2: NDArray[np.float64] = tsne.fit_transform(x_ND)
    return places_N2


def _silhouette(x_ND: NDArray[np.float64], experts_N: NDArray[np.int64]) -> str:
    from sklearn.metrics import silhouette_score

    if not 1 < len(np.unique(experts_N)) < len(experts_N):
        return "undefined"  # one expert has all tokens, or each token has its own
    return f"{silhouette_score(x_ND, experts_N):+.3f}".replace("-", "\u2212")


def _principal_plane(x_ND: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the first two principal components as the initial map of t-SNE, (N, 2).

    They are scaled to a standard deviation of 1e-4, and their signs are fixed.
    """
    centred_ND = x_ND - x_ND.mean(0)
    left, values, _ = np.linalg.svd(centred_ND, full_matrices=False)
    plane_N2 = np.zeros((len(x_ND), 2))
    count = min(2, len(values))
    plane_N2[:, :count] = left[:, :count] * values[:count]
    # LAPACK may return either sign.
    plane_N2 *= np.sign(plane_N2[abs(plane_N2).argmax(0), range(2)])
    spread = plane_N2[:, 0].std()
    return (plane_N2 * (1e-4 / spread if spread > 0 else 0.0)).astype(np.float32)


def _panel(axes: Axes, places_N2: NDArray[np.float64], experts_N: NDArray[np.int64]) -> None:
    # The expert with the most tokens comes first, so that it does not cover the others.
    for expert in np.argsort(-np.bincount(experts_N), kind="stable").tolist():
        own = experts_N == expert
        if own.any():
            axes.scatter(
                places_N2[own, 0],
                places_N2[own, 1],
                s=18,
                c=expert_colour(expert),
                marker=expert_marker(expert),
                edgecolors="white",
                linewidths=0.25,
            )
    axes.set(xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
    axes.set_box_aspect(1)
