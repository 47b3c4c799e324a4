"""Help pages: optional values look optional, and texts are paragraphs."""

from pathlib import Path

import pytest

from acmoe.cli import main
from acmoe.cli.arguments.option_help import option_texts
from acmoe.cli.arguments.parse import parse
from acmoe.cli.commands import COMMANDS
from acmoe.cli.run.analyze import Analyze


def help_page(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_an_optional_value_shows_its_type_and_a_default_that_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = " ".join(help_page(capsys, "analyze").replace("\u2502", " ").split())
    assert "--tokens INT" in page and "--statistics {batch,running,prefix,sequence}" in page
    assert "None" not in page
    assert "(default: 0)" in page and "(default: auto)" in page
    assert "--no-figures" in page and "Draw no figures." in page


def test_none_is_still_accepted_and_a_wrong_choice_is_not() -> None:
    found = parse(COMMANDS, ["analyze", "run", "--tokens", "None", "--statistics", "None"])
    assert isinstance(found, Analyze)
    assert found == Analyze(folder=Path("run"))
    given = ["analyze", "run", "--tokens", "8", "--statistics", "batch", "--no-figures"]
    wanted = Analyze(folder=Path("run"), tokens=8, statistics="batch", figures=False)
    assert parse(COMMANDS, given) == wanted


def test_every_option_of_every_command_has_a_text() -> None:
    from dataclasses import fields
    from typing import Any, cast

    for name, command in COMMANDS.items():
        texts = option_texts(command)
        for field in fields(cast(Any, command)):
            if field.name != "action":  # subcommands have texts of their own
                assert texts.get(field.name), f"{name}: {field.name}"
                assert "\n" not in texts[field.name]
