"""When the demo opens its page in a browser, and when it must not."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from acmoe.cli.commands import COMMANDS
from acmoe.cli.demo import Demo, may_open_browser, next_commands
from acmoe.cli.parse import parse


@pytest.fixture
def desktop(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal on a Linux desktop."""
    for name in ("CI", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    return monkeypatch


def test_a_terminal_on_a_desktop_opens_the_page(desktop: pytest.MonkeyPatch) -> None:
    assert may_open_browser()
    desktop.setattr(sys, "platform", "darwin")
    desktop.delenv("DISPLAY")
    assert may_open_browser()


@pytest.mark.parametrize("why", ["CI", "pipe", "no display", "ssh to a Mac"])
def test_nothing_is_opened_elsewhere(desktop: pytest.MonkeyPatch, why: str) -> None:
    if why == "CI":
        desktop.setenv("CI", "true")
    elif why == "pipe":
        desktop.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    elif why == "no display":
        desktop.delenv("DISPLAY")
    else:
        desktop.setattr(sys, "platform", "darwin")
        desktop.setenv("SSH_CONNECTION", "10.0.0.1 22")
    assert not may_open_browser()


def test_no_open_is_an_option() -> None:
    for words, wanted in ((["demo"], True), (["demo", "--no-open"], False)):
        found = parse(COMMANDS, words)
        assert isinstance(found, Demo) and found.open is wanted


def test_the_next_commands_are_found_by_a_shell_and_known_to_the_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / ".venv" / "bin" / "acmoe"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    for path, name in ((str(program.parent), "acmoe"), (os.defpath, ".venv/bin/acmoe")):
        monkeypatch.setenv("PATH", path)
        words = [shlex.split(command) for command in next_commands(Path("runs/demo"))]
        assert [first for first, *_ in words] == [name] * 3
        for _, *rest in words:
            parse(COMMANDS, rest)
