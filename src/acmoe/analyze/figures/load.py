"""Heat map of the load: the share of the routed tokens that each expert of each layer gets.

M MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acmoe.analyze.figures.canvas import WIDTH, set_heading, write_figure
from acmoe.analyze.figures.inputs import Numbers, as_array, check_count
from acmoe.errors import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NUMBERED = 16  # experts whose percentages have room in their cells
_NUMBERS = "shares in % of the tokens, \u00b1 their standard deviation"
_OCTAVES = 3.0  # the colours end at an eighth and at eight times the even share


def save_load(
    loads: Mapping[str, Numbers], folder: Path, *, title: str, name: str = "load"
) -> tuple[Path, Path]:
    """Draw one panel per router. `loads` holds token counts or shares (M, E) for each router.

    Colour is the ratio of an expert's share to the even share, 1 / E. An expert without a token is
    crossed out. The standard deviation of a layer's shares is written at the end of its row.

    >>> # save_load({"SMoE": [[50, 30, 20, 0]]}, folder, title="Load on the test text")
    """
    check_count(len(loads), 6, "routers")
    shares = {router: _shares(router, load) for router, load in loads.items()}
    rows = sum(len(share_ME) for share_ME in shares.values())

    def draw(figure: Figure) -> None:
        panels = figure.subplots(
            len(shares),
            1,
            squeeze=False,
            height_ratios=[len(share_ME) for share_ME in shares.values()],
        )[:, 0]
        image: Any = None
        for axes, (router, share_ME) in zip(panels, shares.items(), strict=True):
            image = _panel(axes, router, share_ME)
        panels[0].set_title(_NUMBERS, loc="right", fontsize=8)
        panels[-1].set_xlabel("expert")
        set_heading(figure, title)
        bar = figure.colorbar(image, ax=list(panels), pad=0.09, extend="both")
        octaves = range(-int(_OCTAVES), int(_OCTAVES) + 1)
        bar.set_ticks(list(octaves), labels=[f"{2.0**octave:g}" for octave in octaves])
        bar.set_label("load against the even share (times)")

    height = 1.4 + 0.5 * len(shares) + 0.36 * rows
    return write_figure(draw, folder, name, size=(WIDTH, max(height, 3.2)))


def _shares(router: str, load: Numbers) -> NDArray[np.float64]:
    load_ME = as_array(load, f"load of {router!r}", 2).astype(np.float64)
    check(bool((load_ME >= 0).all()), f"load of {router!r} is negative; give tokens or shares")
    total_M1 = load_ME.sum(1, keepdims=True)
    for layer, total in enumerate(total_M1[:, 0].tolist(), start=1):
        check(total > 0, f"layer {layer} of {router!r} has no routed token; leave it out")
    share_ME: NDArray[np.float64] = load_ME / total_M1
    return share_ME


def _panel(axes: Axes, router: str, share_ME: NDArray[np.float64]) -> Any:
    layers, experts = share_ME.shape
    with np.errstate(divide="ignore"):
        octaves_ME = np.log2(share_ME * experts)
    image = axes.imshow(
        np.clip(octaves_ME, -_OCTAVES, _OCTAVES),
        cmap="PuOr_r",
        vmin=-_OCTAVES,
        vmax=_OCTAVES,
        aspect="auto",
    )
    for layer, expert in np.ndindex(layers, experts):
        percent = 100 * share_ME[layer, expert]
        dark = abs(octaves_ME[layer, expert]) > 1.7
        ink = "white" if dark else "black"
        if percent == 0:
            axes.text(expert, layer, "\u00d7", ha="center", va="center", fontsize=7, color=ink)
        elif experts <= _MOST_NUMBERED:
            text = f"{percent:.1f}" if experts <= 10 else f"{percent:.0f}"
            axes.text(expert, layer, text, ha="center", va="center", fontsize=8, color=ink)
    _labels(axes, router, share_ME)
    return image


def _labels(axes: Axes, router: str, share_ME: NDArray[np.float64]) -> None:
    from matplotlib.ticker import MaxNLocator

    layers, experts = share_ME.shape
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_title(router)
    axes.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
    axes.set_ylabel("MoE layer")
    if experts <= _MOST_NUMBERED:
        axes.set_xticks(range(experts))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0)
    spread_M = (100 * share_ME).std(1)
    for layer, spread in enumerate(spread_M):
        text = f"\u00b1 {spread:.1f}"
        axes.annotate(text, (1.01, layer), xycoords=("axes fraction", "data"), va="center")
