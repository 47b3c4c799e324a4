"""Call the command line inside a test."""

import pytest

from acmoe.cli import main


def call(
    capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[str | int | None, str, str]:
    """Return exit code, standard output and standard error of `acmoe ARGUMENTS`."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err
