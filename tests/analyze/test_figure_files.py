"""Every figure: both files, equal bytes for equal input, nothing left behind, one clear refusal."""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from acmoe.analyze.figures.attack_changes import save_changed_patches, save_changed_text
from acmoe.analyze.figures.colored_text import save_colored_text
from acmoe.analyze.figures.convergence import save_curves
from acmoe.analyze.figures.instability import save_instability
from acmoe.analyze.figures.load import save_load
from acmoe.analyze.figures.patches import save_patches
from acmoe.analyze.figures.pgd import save_pgd
from acmoe.analyze.figures.scale_map import save_scale_map
from acmoe.analyze.figures.tsne import save_tsne
from acmoe.errors import UserError

matplotlib = pytest.importorskip("matplotlib")

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(1, 3, 8, 8, generator=GENERATOR)
MAP = torch.randint(0, 4, (1, 2, 2), generator=GENERATOR)
TOKENS = [b"d", b"e", b"f", b"\n", b"$"]
POINTS = torch.randn(24, 5, generator=GENERATOR)
EXPERTS = torch.arange(24) % 4
FOUR = {"num_experts": 4, "title": "title"}

# Titles and labels with a dollar sign: other people's text is never read as a formula.
FIGURES: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "convergence": lambda folder: save_curves(
        {"$a_b$": ((1, 2), (3.0, 2.0))}, folder, metric="loss (nats)", title="title"
    ),
    "patches": lambda folder: save_patches(IMAGES, {"router": MAP}, folder, **FOUR),
    "colored_text": lambda folder: save_colored_text(
        TOKENS, {"router": [0, 1, 2, 3, 0]}, folder, **FOUR
    ),
    "tsne": lambda folder: save_tsne({"router": (POINTS, EXPERTS)}, folder, **FOUR),
    "instability": lambda folder: save_instability(
        {"router": [None, (0.2, 0.3)]}, folder, title="title"
    ),
    "load": lambda folder: save_load({"router": [[3, 1, 0, 4]]}, folder, title="title"),
    "pgd": lambda folder: save_pgd(
        {"top-1": {"router": ((0, 1 / 255), (90.0, 50.0))}}, folder, title="title"
    ),
    "scale_map": lambda folder: save_scale_map(torch.ones(4, 6), folder, title="title"),
    "attack_changes": lambda folder: save_changed_patches(
        (IMAGES, IMAGES.flip(-1)), (MAP, MAP.flip(-1)), folder, **FOUR
    ),
    "changed_text": lambda folder: save_changed_text(
        (TOKENS, TOKENS[::-1]),
        ([0, 1, 2, 3, 0], [0, 1, 1, 3, 2]),
        folder,
        name="changed_text",
        **FOUR,
    ),
}


def style() -> list[object]:
    """Settings that the figures change for themselves."""
    return [matplotlib.rcParams[key] for key in ("font.size", "svg.hashsalt", "text.parse_math")]


# Where two figures have the same marks, one of them is slow.
@pytest.mark.parametrize(
    "name",
    [name if name == "patches" else pytest.param(name, marks=pytest.mark.slow) for name in FIGURES],
)
def test_equal_input_gives_equal_files_whatever_style_the_user_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyplot keeps every figure it opens: importing it here would raise.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    before = style()
    first = FIGURES[name](tmp_path / "new" / "folder")
    with matplotlib.rc_context({"font.size": 31, "axes.facecolor": "red", "figure.dpi": 20}):
        second = FIGURES[name](tmp_path / "again")
    assert [path.name for path in first] == [f"{name}.png", f"{name}.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    png, svg = first
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert style() == before


@pytest.mark.parametrize("name", FIGURES)
def test_without_matplotlib_one_line_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'acmoe\[plots\]'"):
        FIGURES[name](tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_scikit_learn_the_map_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(UserError, match=r"pip install 'acmoe\[plots\]'"):
        FIGURES["tsne"](tmp_path)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an expert out of range": (
        lambda folder: save_colored_text(["a"], {"r": [4]}, folder, **FOUR),
        "experts of 'r' reaches from 4 to 4; with num_experts=4 they are 0 to 3",
    ),
    "experts that are no whole numbers": (
        lambda folder: save_colored_text(["a"], {"r": [0.5]}, folder, **FOUR),
        "experts of 'r' has dtype float64; experts are whole numbers",
    ),
    "a token without an expert": (
        lambda folder: save_colored_text(["a", "b"], {"r": [0]}, folder, **FOUR),
        "'r' has 1 experts for 2 tokens; give one for each",
    ),
    "no token": (
        lambda folder: save_colored_text([], {"r": [0]}, folder, **FOUR),
        "tokens holds 0 tokens; a page has room for 1 to 5000",
    ),
    "normalised pixels": (
        lambda folder: save_patches(IMAGES * 4 - 2, {"r": MAP}, folder, **FOUR),
        "undo the normalisation",
    ),
    "images with channels last": (
        lambda folder: save_patches(np.zeros((1, 8, 8, 3)), {"r": MAP}, folder, **FOUR),
        r"images has shape \(1, 8, 8, 3\); give \(images, 1 or 3, rows, columns\)",
    ),
    "too few captions": (
        lambda folder: save_patches(IMAGES, {"r": MAP}, folder, captions=[], **FOUR),
        "0 captions for 1 images; give one for each",
    ),
    "more curves than can be told apart": (
        lambda folder: save_curves(
            {str(n): ((1,), (1.0,)) for n in range(7)}, folder, metric="m", title="t"
        ),
        "7 curves; one figure holds 1 to 6",
    ),
    "a curve that misses a value": (
        lambda folder: save_curves({"a": ((1, 2), (1.0,))}, folder, metric="m", title="t"),
        "'a' has 2 places and 1 values; pair them",
    ),
    "a single MoE layer": (
        lambda folder: save_instability({"a": [None]}, folder, title="t"),
        "no two MoE layers route the same tokens",
    ),
    "a layer without a token": (
        lambda folder: save_load({"a": [[1, 1], [0, 0]]}, folder, title="t"),
        r"layer 2 of 'a' has no routed token; leave it out",
    ),
    "accuracies as shares": (
        lambda folder: save_pgd({"top-1": {"a": ((0,), (101.0,))}}, folder, title="t"),
        "top-1 of 'a' leaves 0 to 100; give accuracies in percent",
    ),
    "a scale that is not positive": (
        lambda folder: save_scale_map([[1.0, 0.0]], folder, title="t"),
        "scale reaches 0; M is positive",
    ),
    "numbers that are not": (
        lambda folder: save_scale_map([[float("nan")]], folder, title="t"),
        "scale holds NaN or infinity",
    ),
    "a map of seven tokens": (
        lambda folder: save_tsne({"a": (POINTS[:7], EXPERTS[:7])}, folder, **FOUR),
        "'a' has 7 features and 7 experts; give 8 or more",
    ),
    "attacked text of another length": (
        lambda folder: save_changed_text((["a"], ["a", "b"]), ([0], [0]), folder, **FOUR),
        "1 clean tokens and 2 attacked ones; pair them place for place",
    ),
    "attacked experts of another grid": (
        lambda folder: save_changed_patches((IMAGES, IMAGES), (MAP, MAP[:, :1]), folder, **FOUR),
        r"experts are \(1, 2, 2\) and \(1, 1, 2\) for 1 inputs; pair them",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_with_its_value_and_the_fix(
    what: str, tmp_path: Path
) -> None:
    draw, message = REFUSED[what]
    with pytest.raises(UserError, match=message):
        draw(tmp_path)
    assert not list(tmp_path.glob("*.png"))
