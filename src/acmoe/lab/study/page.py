"""A page with a place for each study: what stands between its markers is ours, the rest is not."""

from pathlib import Path

from acmoe.errors import UserError
from acmoe.lab.bench.page import replace_between
from acmoe.train.checkpoint import write_text


def markers(name: str) -> tuple[str, str]:
    return f"<!-- study:{name}:begin -->", f"<!-- study:{name}:end -->"


def write_page(path: Path, name: str, content: str) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a page with --page") from error
    write_text(path, replace_between(text, *markers(name), content, page=str(path)))
