"""Heat map of the scale: which clusters stretch which features.

C clusters, D features.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.canvas import WIDTH, set_heading, write_figure
from acmoe.analyze.figures.inputs import Numbers, as_array
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE = "#0072B2", "#E69F00"
# Octaves. A smaller range would show the rounding errors of an identity M in full colour.
_LEAST_RANGE = 0.05


def save_scale_map(
    scale: Numbers,
    folder: Path,
    *,
    title: str,
    clusters: Numbers | None = None,
    name: str = "scale_map",
) -> tuple[Path, Path]:
    """Draw `scale` (C, D), the diagonals of M, as a map of log2 M. At 0 a feature is unchanged.

    Features are sorted by the mean of log2 M over clusters, the part that all clusters have in
    common. A panel above the map shows this mean and the standard deviation of the clusters around
    it. A panel at the right shows the root mean square of each cluster's log2 M, its distance from
    the identity. `clusters` holds the cluster numbers of the rows if some clusters are left out.

    >>> # save_scale_map(record.layers[1].scale_CD, folder, title="Layer 2")
    """
    scale_CD = as_array(scale, "scale", 2).astype(np.float64)
    check(bool((scale_CD > 0).all()), f"scale reaches {scale_CD.min():g}; M is positive")
    log_CD = np.log2(scale_CD)
    order_D = np.argsort(-log_CD.mean(0), kind="stable")
    log_CD = log_CD[:, order_D]
    clusters_C = np.arange(len(log_CD)) if clusters is None else as_array(clusters, "clusters", 1)
    check(
        len(clusters_C) == len(log_CD),
        f"{len(clusters_C)} clusters for {len(log_CD)} rows of scale; number each",
    )
    inches = 0.17 * min(len(log_CD), 16) + 0.08 * max(0, len(log_CD) - 16)
    inches = max(inches, 1.3)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(2, 2, width_ratios=(6, 1), height_ratios=(1.0, inches))
        _common(grid[0, 0], log_CD)
        grid[0, 1].set_axis_off()
        image = _map(grid[1, 0], log_CD, clusters_C)
        _distance(grid[1, 1], log_CD)
        figure.colorbar(image, ax=list(grid[:, 1]), label="log2 M (octaves)", fraction=0.5)
        set_heading(figure, title)

    return write_figure(draw, folder, name, size=(WIDTH, 2.4 + inches))


def _common(axes: Axes, log_CD: NDArray[np.float64]) -> None:
    common_D, own_D = log_CD.mean(0), log_CD.std(0)
    x_D = np.arange(log_CD.shape[1])
    axes.fill_between(
        x_D,
        common_D - own_D,
        common_D + own_D,
        step="mid",
        color=_ORANGE,
        alpha=0.45,
        linewidth=0,
        label="\u00b1 standard deviation over clusters",
    )
    axes.step(x_D, common_D, where="mid", color=_BLUE, linewidth=1.6, label="common part")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlim=(-0.5, len(x_D) - 0.5), ylabel="log2 M")
    axes.tick_params(labelbottom=False)
    # The legend is above the axes because the band may fill them.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8)


def _map(axes: Axes, log_CD: NDArray[np.float64], clusters_C: NDArray[Any]) -> Any:
    from matplotlib.ticker import MaxNLocator

    reach = max(float(abs(log_CD).max()), _LEAST_RANGE)
    image = axes.imshow(
        log_CD, cmap="PuOr_r", vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    every = -(-len(clusters_C) // 16)
    axes.set_yticks(range(0, len(clusters_C), every), [str(c) for c in clusters_C[::every]])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="feature, most stretched by all clusters first", ylabel="cluster")
    return image


def _distance(axes: Axes, log_CD: NDArray[np.float64]) -> None:
    distance_C = np.sqrt((log_CD**2).mean(1))
    axes.barh(np.arange(len(log_CD)), distance_C, 0.75, color=_BLUE)
    axes.set(ylim=(len(log_CD) - 0.5, -0.5), xlabel="rms of\nlog2 M")
    axes.set_xlim(0, max(1.15 * float(distance_C.max()), _LEAST_RANGE))
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
