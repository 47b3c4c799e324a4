"""When the demo opens its page in a browser, and when it must not."""

import sys

import pytest

from acmoe.cli.commands import COMMANDS
from acmoe.cli.demo import Demo, may_open_browser
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
