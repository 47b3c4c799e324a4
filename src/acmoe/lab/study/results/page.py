"""A Markdown page with a section for each study; only the text between its markers is replaced."""

from pathlib import Path

from acmoe.errors import UserError
from acmoe.lab.bench.page import replace_between
from acmoe.storage.atomic import replace_text


def markers(name: str) -> tuple[str, str]:
    """Return the comments that mark start and end of a study's section."""
    return f"<!-- study:{name}:begin -->", f"<!-- study:{name}:end -->"


def write_page(path: Path, name: str, content: str) -> None:
    """Replace a study's section of the page."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a page with --page") from error
    replace_text(path, replace_between(text, *markers(name), content, page=str(path)))
