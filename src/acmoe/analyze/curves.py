"""Convergence curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from acmoe.analyze.theory_plots import BLUE, GREEN, ORANGE, RED, STYLE
from acmoe.errors import UserError, check

# Told apart by colour, dashes and marks: any one of them is enough.
_LINES = ((BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (RED, ":", "D"))


def save_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    folder: Path,
    *,
    metric: str,
    title: str,
    name: str = "convergence",
) -> list[Path]:
    """Write `name`.png and .svg into `folder`; each curve is its steps and values.

    >>> # save_curves({c.router: (c.steps, c.values) for c in comparison.curves}, folder, ...)
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UserError("figures need the plots extra: pip install 'acmoe[plots]'") from error
    check(
        0 < len(curves) <= len(_LINES), f"{len(curves)} curves; one figure holds 1 to {len(_LINES)}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.4), dpi=180, layout="constrained")
        axes = figure.subplots()
        for (colour, dashes, mark), (label, (steps, values)) in zip(
            _LINES, curves.items(), strict=False
        ):
            axes.plot(steps, values, dashes, color=colour, marker=mark, markersize=4, label=label)
        axes.set(title=title, xlabel="optimizer step", ylabel=metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
            paths.append(folder / f"{name}{suffix}")
            figure.savefig(paths[-1], metadata=metadata)
    return paths
