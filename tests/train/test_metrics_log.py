"""metrics.jsonl and what a person sees while it grows."""

import errno
import io
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from acmoe.errors import UserError
from acmoe.evaluate.run import open_run, read_metrics
from acmoe.storage.lines import append_line
from acmoe.train.metrics_log import Board, MetricsLog, drop_records_after
from acmoe.train.run import train
from acmoe.train.text import TextValidation
from acmoe.train.update import Update
from tiny_runs import byte_corpus, records, tiny_run


def update(loss: float, aux: float = 0.0) -> Update:
    pair = torch.tensor([loss, aux])
    return Update(pair[0], pair[1], pair.isfinite().all(), ())


def test_a_line_averages_the_steps_since_the_last(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "perplexity")
    log.open(0)
    for loss in (1.0, 2.0, 6.0):
        log.add(update(loss, aux=loss / 2), units=10)
    assert log.read_losses() is None
    loads = [torch.tensor([3.0, 1.0])]
    record = log.train_record(3, lr=0.5, loads=loads)
    assert (record["loss"], record["aux_loss"], record["lr"]) == (3.0, 1.5, 0.5)
    assert record["perplexity"] == pytest.approx(20.085536923187668)  # e^3
    assert record["load_balance"] == [pytest.approx(25.0)]  # shares of 75 and 25 percent
    log.add(update(4.0), units=10)
    log.read_losses()
    assert log.train_record(4, lr=0.5, loads=[])["loss"] == 4.0
    assert [line["step"] for line in read_metrics(log.path)] == [3, 4]


def test_the_first_update_that_is_not_finite_is_found_by_its_place(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "perplexity")
    log.open(0)
    for loss in (1.0, 2.0):
        log.add(update(loss), units=1)
    assert log.read_losses() is None
    for loss in (3.0, float("nan"), float("inf")):
        log.add(update(loss), units=1)
    assert log.read_losses() == 1
    log.add(update(1.0, aux=float("inf")), units=1)
    assert log.read_losses() == 0


def test_the_best_validation_is_remembered(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "bits per byte")
    log.open(0)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5)):
        log.valid_record(step, TextValidation(loss, 10, "running", 2, 16))
    assert (log.best_step, log.best) == (2, {"step": 2, "loss": 2.0})
    assert log.best_value == pytest.approx(2.8853900817779268)  # 2 nats in bits
    last = read_metrics(log.path)[-1]
    assert (last["statistics"], last["batch"], last["block"], last["tokens"]) == (
        "running",
        2,
        16,
        10,
    )


def test_the_clock_stands_still_while_paused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "perplexity")
    log.open(0)
    with log.paused():
        time.sleep(0.2)
    log.add(update(1.0), units=1)
    log.read_losses()
    assert log.train_record(1, lr=1.0, loads=[])["seconds"] < 0.1


def test_lines_beyond_a_step_and_torn_lines_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_line(path, {"kind": "train", "step": step})
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    drop_records_after(path, 2)
    assert path.read_text().count("\n") == 2
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_run_writes_its_metrics_line_by_line(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "steps=10", "log_every=4", "eval_every=5")
    train(config, tmp_path / "run", console=Console(quiet=True))
    lines = records(tmp_path / "run")
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 4),
        ("valid", 5),
        ("train", 8),
        ("train", 10),
        ("valid", 10),
    ]
    assert [len(line["load_balance"]) for line in lines if line["kind"] == "train"] == [3, 3, 3]
    assert lines[0]["lr"] == pytest.approx(0.01 * 4 / 5)
    times = [line["seconds"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert times == sorted(times)


def test_without_a_terminal_progress_is_plain_lines(tmp_path: Path) -> None:
    text = io.StringIO()
    config = tiny_run(byte_corpus(tmp_path), "steps=4", "log_every=2", "eval_every=4")
    train(config, tmp_path / "run", console=Console(file=text, width=40))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("run: 4 steps; figures go to ")
    assert lines[1].startswith("run: step 2/4  loss 5.")
    assert " nats  " in lines[1] and "tokens/s" in lines[1] and "s left" in lines[1]
    assert "load std" in lines[1] and "points (0 is even)" in lines[1]
    assert lines[3].startswith("run: step 4/4  validation ")
    assert lines[3].endswith(" bits per byte")
    assert "\x1b" not in text.getvalue()


def test_on_a_terminal_progress_is_a_bar(tmp_path: Path) -> None:
    text = io.StringIO()
    config = tiny_run(byte_corpus(tmp_path), "steps=4", "log_every=2", "eval_every=4")
    terminal = Console(file=text, force_terminal=True, width=160)
    train(config, tmp_path / "run", console=terminal)
    shown = text.getvalue()
    assert "4/4" in shown and "loss" in shown and "tokens/s" in shown
    assert "\x1b[" in shown


def test_tensorboard_gets_the_same_figures_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Board, "available", True)
    log = MetricsLog(tmp_path, "perplexity")
    log.open(7)
    record = log.valid_record(9, TextValidation(2.0, 10, "none", 2, 16))
    assert written[0] == ("tensorboard", 8)  # events after step 7 will be written again
    log.close()
    assert written[-1] == "closed"
    log.close()  # a second time does nothing
    assert ("valid/loss", 2.0, 9) in written
    assert ("valid/perplexity", record["perplexity"], 9) in written


@pytest.mark.parametrize("fails", ["open", "flush", "close"])
def test_a_full_disk_under_tensorboard_is_one_line(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(at: str) -> None:
        if at == fails:
            raise OSError(errno.ENOSPC, "No space left on device")

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            full("open")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            pass

        def flush(self) -> None:
            full("flush")

        def close(self) -> None:
            full("close")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Board, "available", True)
    board = Board(tmp_path / "tensorboard")
    with pytest.raises(UserError, match=r"cannot write .*tensorboard: No space left on device"):
        board.open(0)
        board.write({"kind": "train", "step": 1, "loss": 2.0})
        board.close()
    board.close()  # a failed writer is not closed twice


def test_without_tensorboard_nothing_is_written_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Board, "available", False)
    log = MetricsLog(tmp_path, "perplexity")
    log.open(0)
    log.valid_record(1, TextValidation(2.0, 10, "none", 2, 16))
    assert not (tmp_path / "tensorboard").exists()


def test_a_file_cut_off_between_two_lines_lacks_records(tmp_path: Path) -> None:
    # 4 lines of training and 2 of validation; the checkpoint of step 4 has counted all six.
    config = tiny_run(byte_corpus(tmp_path), "steps=4", "log_every=1", "eval_every=2")
    folder, text = tmp_path / "run", io.StringIO()
    train(config, folder, console=Console(quiet=True))
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    missing = f"{path}: 2 of the 6 records up to step 4 are missing"
    with pytest.warns(UserWarning) as caught:
        assert len(open_run(folder).metrics("train")) == 3
    assert [str(one.message) for one in caught] == [missing]
    train(config, folder, console=Console(file=text, width=1000))
    assert missing in text.getvalue().splitlines()
