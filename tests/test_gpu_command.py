"""`make test-gpu`: it never passes without having run a test on a GPU."""

import sys
from pathlib import Path

import pytest
import torch

import test_gpu as command


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_it_says_so_and_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "finds no CUDA device here" in capfd.readouterr().err


def test_a_failure_of_either_call_is_the_result() -> None:
    assert command.exit_code([0, 0]) == 0
    assert command.exit_code([0, 5]) == 0  # -k chose tests of one call
    assert command.exit_code([5, 5]) == 5
    assert command.exit_code([5, 1]) == 1 and command.exit_code([2, 1]) == 2


def test_every_marked_test_is_in_one_of_the_calls() -> None:
    in_folders, elsewhere = command.commands(["-x"])
    assert all((command.ROOT / folder).is_dir() for folder in command.FOLDERS)
    assert in_folders[:2] == [sys.executable, "-m"] and in_folders[-1] == elsewhere[-1] == "-x"
    assert elsewhere[elsewhere.index("-m", 2) + 1] == "gpu"


def test_the_makefile_calls_it() -> None:
    text = Path(command.ROOT / "Makefile").read_text()
    rule = text.split("\ntest-gpu:")[1].splitlines()[1]
    assert rule.strip() == "$(BIN)/python tools/test_gpu.py"
