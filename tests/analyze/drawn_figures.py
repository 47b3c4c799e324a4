"""Return what a figure holds without rendering it, which takes most of the time."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def drawn(save: Callable[[], tuple[Path, Path]]) -> Figure:
    """The figure that `save` would have written twice, as PNG and as SVG."""
    with mock.patch.object(Figure, "savefig", autospec=True) as savefig:
        paths = save()
    figures = [call.args[0] for call in savefig.call_args_list]
    assert [call.args[1] for call in savefig.call_args_list] == list(paths)
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert figures[0] is figures[1]
    return figures[0]


def texts(axes: Axes | Figure) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def tiles(axes: Axes) -> list[Rectangle]:
    """Filled rectangles, in the order they were drawn."""
    return [one for one in axes.patches if isinstance(one, Rectangle) and one.get_fill()]


def outlines(axes: Axes) -> list[Rectangle]:
    return [one for one in axes.patches if isinstance(one, Rectangle) and not one.get_fill()]
