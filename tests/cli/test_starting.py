"""Ctrl-C in the seconds in which a command imports torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from acmoe import starting
from acmoe.cli import main

SOURCE = Path(starting.__file__).parents[1]
SLOW_TORCH = """
import pathlib, time
pathlib.Path(__file__).with_name("importing").touch()
time.sleep(60)
"""


def interrupted(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and standard error of a command that gets ctrl-C in the middle of `import torch`.

    The torch that it imports is a module in `folder` that takes a minute.
    """
    (folder / "torch.py").write_text(SLOW_TORCH)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        for _ in range(600):
            if (folder / "importing").exists():
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize("options", [[], ["-u", "-X", "utf8"]])
def test_a_module_that_still_imports_torch_ends_in_one_line(
    tmp_path: Path, options: list[str]
) -> None:
    command = [sys.executable, *options, "-m", "acmoe", "models"]
    assert interrupted(command, tmp_path) == (130, "acmoe: interrupted\n")


def test_a_script_that_still_imports_torch_ends_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "acmoe"  # as pip writes it
    script.write_text("import sys\nfrom acmoe.cli import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "models"]
    assert interrupted(command, tmp_path) == (130, "acmoe: interrupted\n")


def test_a_program_of_the_user_keeps_its_keyboard_interrupt(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import acmoe\n")
    code, said = interrupted([sys.executable, str(program)], tmp_path)
    assert code == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")


def test_a_process_with_the_arguments_of_its_parent_is_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/acmoe", "study", "nano"])
    spawned = ["/bin/python", "-c", "from multiprocessing.spawn import ...", "--multiprocessing"]
    for started, command in ((spawned, False), (["/bin/python", *sys.argv], True)):
        monkeypatch.setattr(sys, "orig_argv", started)
        assert starting._is_command() is command


@pytest.mark.parametrize("argument", ["runs/acmoe", "acmoe.yaml"])
@pytest.mark.parametrize("left", [["train.py"], []])
def test_a_program_that_takes_its_arguments_out_is_no_command(
    monkeypatch: pytest.MonkeyPatch, argument: str, left: list[str]
) -> None:
    """Such as `python train.py runs/acmoe`, which then sets sys.argv and imports acmoe."""
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "train.py", argument])
    monkeypatch.setattr(sys, "argv", left)
    assert not starting._is_command()


def test_main_raises_on_ctrl_c_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, starting._end)
    try:
        with pytest.raises(SystemExit):
            main(["--version"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
