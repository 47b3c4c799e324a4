"""Help pages fit the terminal, and a completion script is left as it is."""

import io
import re

import pytest

from acmoe.cli import main
from acmoe.cli.arguments.help_page import HeldOutput, fitted
from acmoe.cli.commands import COMMANDS

PAGES = [(), *((name,) for name in COMMANDS), ("data", "prepare"), ("bench", "layer")]


def page(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def beginning(text):
    """The words of the usage line and of the first paragraph below it."""
    return re.findall(r"\w[\w-]*", " ".join(text.split("\n\n")[:2]))


@pytest.mark.parametrize("columns", [50, 80])
@pytest.mark.parametrize("arguments", PAGES, ids=" ".join)
def test_no_line_of_a_help_page_is_wider_than_the_terminal(capsys, monkeypatch, arguments, columns):
    monkeypatch.setenv("COLUMNS", "1000")
    wide = beginning(page(capsys, *arguments))
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = page(capsys, *arguments)
    assert max(map(len, narrow.splitlines())) <= columns
    assert beginning(narrow) == wide and len(wide) > 4  # no word is lost


def test_text_that_is_no_help_page_keeps_its_long_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    script = "# a script\n" + "x " * 40 + "\n"
    assert fitted(script) == script
    # Seven words of two letters with six blanks between are 20 characters.
    assert fitted("usage: a\n\n" + "ab " * 8) == "usage: a\n\nab ab ab ab ab ab ab\nab"


def test_held_output_has_the_style_of_the_terminal():
    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self):
            return True

    held = HeldOutput(Terminal())
    assert held.isatty() and held.encoding == "ascii"
    assert not HeldOutput(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")).isatty()
