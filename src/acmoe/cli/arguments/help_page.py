"""Fit the usage line and the description of a help page to the terminal; tyro fits the rest."""

import io
import re
import shutil
from textwrap import wrap
from typing import TextIO

_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # colours, and bold or dim text, of a terminal


class HeldOutput(io.StringIO):
    """Holds what is printed, which has the style and the characters of another stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()


def fitted(page: str) -> str:
    """Return a help page without lines that are longer than those of the terminal.

    Other text is returned as it is: a script that completes commands may have long lines.
    """
    if not _STYLE.sub("", page).startswith("usage:"):
        return page
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in page.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    plain = _STYLE.sub("", line)
    if len(plain) <= width:
        return [line]
    usage = plain.startswith("usage:")
    text = plain.replace(",", ", ") if usage else plain  # lines break behind the commas of {a,b}
    return wrap(text, width, subsequent_indent=" " * 7 if usage else "", break_on_hyphens=False)
