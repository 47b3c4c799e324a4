"""When the demo opens its page in a browser, and when it must not; the files it leaves."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from acmoe.cli import demo
from acmoe.cli.arguments.parse import parse
from acmoe.cli.commands import COMMANDS
from acmoe.cli.demo import Demo, may_open_browser, next_commands
from acmoe.config.text.train import RunConfig
from acmoe.recipes import recipe
from acmoe.train.side_by_side.compare import Comparison, Curve, Row


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


def test_the_next_commands_quote_a_folder_and_name_the_steps_of_the_recipe() -> None:
    (generate, analyze, train), purposes = zip(*next_commands(Path("my runs")).items(), strict=True)
    assert "my runs/acmoe" in shlex.split(generate) and "my runs/acmoe" in shlex.split(analyze)
    config = recipe(shlex.split(train)[-1])
    assert isinstance(config, RunConfig) and f"{config.steps:,} steps" in purposes[-1]


def test_with_json_the_figure_is_drawn_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"bits_per_byte": 2.0, "contaminated": 2.1, "load_balance": 1.0, "instability": 0.2}
    found = Comparison(
        **{"corpus": "text", "seed": 0, "steps": 2, "tokens": 9, "test_tokens": 9, "replaced": 0.1},
        rows=tuple(
            Row(router=name, chance=0.3, seconds_per_step=0.1, **figures)
            for name in ("SMoE", "ACMoE")
        ),
        curves=(Curve(router="SMoE", steps=(1, 2), values=(3.0, 2.0)),),
        folder=str(tmp_path),
    )
    monkeypatch.setattr(Demo, "_compare", lambda self: found)
    monkeypatch.setattr(demo, "_report", lambda folder: folder / "report.html")
    assert Demo(out=tmp_path, json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["replaced"] == 0.1
    assert (tmp_path / "convergence.svg").is_file()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert Demo(out=tmp_path, json=True).run() == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["corpus"] == "text"
    assert "no figure: figures need the plots extra" in printed.err
