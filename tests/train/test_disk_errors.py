"""A disk that refuses a write ends training in one line; the last good checkpoint stays whole."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import acmoe.train.checkpoint
from acmoe.cli import main
from acmoe.errors import UserError
from acmoe.evaluate.run import open_run
from acmoe.train.loop import TrainLoop
from acmoe.train.run import train
from tiny_runs import QUIET, byte_corpus, everything, tiny_run, trained

SHORT = ("steps=8", "checkpoint_every=4", "log_every=2", "eval_every=8")


def fails_after(real: Callable[..., Any], calls: int, code: int) -> Callable[..., Any]:
    """The function, which fails with an error of the file system after some calls."""
    count = 0

    def function(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return function


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*"))


@pytest.mark.parametrize(
    "code",
    [
        errno.ENOSPC,
        pytest.param(errno.EROFS, marks=pytest.mark.slow),
        pytest.param(errno.EFBIG, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = tiny_run(byte_corpus(tmp_path), *SHORT), tmp_path / "run"
    module = acmoe.train.checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fails_after(module.save_file, 1, code))
        with pytest.raises(UserError, match=f"cannot write .*: {os.strerror(code)}") as stop:
            train(config, folder, console=QUIET)
    assert "\n" not in str(stop.value)
    assert open_run(folder).checkpoint("last").name == "step-00000004" and not hidden(folder)
    train(config, folder, console=QUIET)
    assert everything(folder) == everything(trained(config, tmp_path / "whole"))


def test_a_log_that_cannot_be_written_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = tiny_run(byte_corpus(tmp_path), *SHORT), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails_after(os.write, 2, errno.ENOSPC))
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left"):
            train(config, folder, console=QUIET)
    assert not hidden(folder)


def test_a_folder_that_takes_no_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(byte_corpus(tmp_path), *SHORT)
    monkeypatch.setattr(Path, "mkdir", fails_after(Path.mkdir, 0, errno.EROFS))
    with pytest.raises(UserError, match=r"cannot write .*run: Read-only file system"):
        train(config, tmp_path / "run", console=QUIET)


@pytest.mark.parametrize("log_every", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_run_folder_renamed_under_way_is_not_made_again(
    log_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = ("checkpoint_every=3", f"log_every={log_every}")
    config = tiny_run(byte_corpus(tmp_path), "steps=8", "eval_every=8", *often)
    folder, moved = tmp_path / "run", tmp_path / "moved"
    real = TrainLoop._check_finite

    def renames(self: TrainLoop, step: int) -> None:
        if step == 6 and folder.exists():
            folder.rename(moved)
        real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainLoop, "_check_finite", renames)
        with pytest.raises(UserError, match="No such file" if log_every == 1 else "was renamed"):
            train(config, folder, console=QUIET)
    assert not folder.exists()
    assert open_run(moved).checkpoint("last").name == "step-00000003" and not hidden(moved)


def test_the_command_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "mkdir", fails_after(Path.mkdir, 0, errno.ENOSPC))
    with pytest.raises(SystemExit) as stop:
        main(["train", "switch-nano", "--out", str(tmp_path / "run")])
    assert stop.value.code in (1, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("acmoe: ") and not any("Traceback" in line for line in lines)


LIMITED = """
import resource, sys
from pathlib import Path
from acmoe.errors import UserError
from tiny_runs import QUIET, byte_corpus, tiny_run, train
config = tiny_run(Path(sys.argv[1]), "steps=4", "checkpoint_every=2", "eval_every=4")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # less than the weights have
try:
    train(config, Path(sys.argv[2]), console=QUIET)
except UserError as error:
    sys.exit(f"acmoe: {error}")
"""


@pytest.mark.slow  # a process of its own
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="POSIX")
def test_a_real_limit_on_file_sizes(tmp_path: Path) -> None:
    corpus, folder = byte_corpus(tmp_path), tmp_path / "run"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(corpus), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=120,
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert "cannot write" in ended.stderr and "File too large" in ended.stderr
    assert not hidden(folder) and not list((folder / "checkpoints").iterdir())
