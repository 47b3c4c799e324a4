"""Convergence curves: both files, the same bytes for the same figures."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from acmoe.analyze.curves import save_curves
from acmoe.errors import UserError

CURVES = {"SMoE": ((10, 20, 30), (5.0, 4.0, 3.5)), "ACMoE": ((10, 20, 30), (5.1, 3.9, 3.6))}
LABELS = {"metric": "bits per byte", "title": "Python standard library"}


def test_a_png_and_an_svg_are_written_with_both_names(tmp_path: Path) -> None:
    png, svg = save_curves(CURVES, tmp_path / "new", **LABELS)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for word in ("SMoE", "ACMoE", "bits per byte", "Python standard library", "optimizer step"):
        assert f"<!-- {word} -->" in text


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    first, second = (save_curves(CURVES, tmp_path / name, **LABELS) for name in ("a", "b"))
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_more_curves_than_can_be_told_apart_are_refused(tmp_path: Path) -> None:
    many = {str(n): ((1,), (1.0,)) for n in range(5)}
    with pytest.raises(UserError, match="5 curves; one figure holds 1 to 4"):
        save_curves(many, tmp_path, **LABELS)


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"pip install 'acmoe\[plots\]'"):
        save_curves(CURVES, tmp_path, **LABELS)
