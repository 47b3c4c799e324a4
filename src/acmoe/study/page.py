"""A page with a place for each study: what stands between its markers is ours, the rest is not."""

import re
from pathlib import Path

from acmoe.errors import UserError, check
from acmoe.train.checkpoint import write_text


def markers(name: str) -> tuple[str, str]:
    return f"<!-- study:{name}:begin -->", f"<!-- study:{name}:end -->"


def put(text: str, name: str, content: str) -> str:
    """The page with the study's part replaced; everything else stays as it was."""
    begin, end = markers(name)
    pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    count = len(pattern.findall(text))
    check(
        count == 1,
        f"the page has {count} places for the study {name!r}; it needs one {begin} with one {end} "
        "behind it",
    )
    return pattern.sub(lambda _: f"{begin}\n\n{content.strip()}\n\n{end}", text)


def write_page(path: Path, name: str, content: str) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a page with --page") from error
    write_text(path, put(text, name, content))
