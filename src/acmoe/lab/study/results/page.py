"""A Markdown page with a section for each study; only the text between its markers is replaced."""

import os
from collections.abc import Iterable
from pathlib import Path

from acmoe.errors import UserError
from acmoe.lab.marked_page import replace_between
from acmoe.storage.atomic import replace_text, report_write_errors


def markers(name: str) -> tuple[str, str]:
    """Return the comments that mark start and end of a study's section."""
    return f"<!-- study:{name}:begin -->", f"<!-- study:{name}:end -->"


def write_page(path: Path, name: str, content: str) -> None:
    """Replace a study's section of the page, or begin a page that holds only that section."""
    text = with_section(path, name, content)
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def with_section(path: Path, name: str, content: str) -> str:
    """Return the text of the page with that section; raise where it has no place for it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = "\n".join([f"# The study `{name}`", "", *markers(name), ""])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a page with --page") from error
    return replace_between(text, *markers(name), content, page=str(path))


def shown_figures(figures: Iterable[Path], page: Path) -> list[str]:
    """Return the places of the figures that the page shows (SVG), relative to the page."""
    return [
        Path(os.path.relpath(figure, page.parent)).as_posix()
        for figure in figures
        if figure.suffix == ".svg"
    ]
