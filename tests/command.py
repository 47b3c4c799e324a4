"""Call the command line in this process."""

import pytest

from acmoe.cli import main


def acmoe(*arguments: object) -> int:
    """Run `acmoe ARGUMENTS...` and return its exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code
