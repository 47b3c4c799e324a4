"""Finetuning survives a damaged checkpoint and a disk that refuses a write, and says so."""

import errno
import io
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import acmoe.train.checkpoint
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.errors import UserError
from acmoe.train.finetune import Finetuner, FinetuneReport, finetune
from tiny_runs import QUIET, byte_corpus, records, tiny_run, trained

CONFIG = FinetuneConfig(task="sst2", epochs=3, batch=4, lr=1e-3, device="cpu")
SMALL = (
    *("steps=2", "checkpoint_every=2", "eval_every=2"),
    *("model.repeats=2", "model.dim=8", "model.hidden=8"),
)
Tune = Callable[..., FinetuneReport]


@pytest.fixture(scope="module")
def tune(tmp_path_factory: pytest.TempPathFactory) -> Tune:
    """Return a function that finetunes a run of two steps on twelve sentences, into a folder."""
    shared = tmp_path_factory.mktemp("shared")
    for split in ("train", "dev", "test"):
        rows = "".join(f"a {'good' if n % 2 else 'bad'} film {n}\t{n % 2}\n" for n in range(12))
        (shared / f"{split}.tsv").write_text(rows)
    config = tiny_run(byte_corpus(shared), *SMALL)
    run = trained(config, shared / "run")

    def call(out: Path, console: Console = QUIET) -> FinetuneReport:
        return finetune(run, CONFIG, shared, out=out, console=console)

    return call


@pytest.fixture(scope="module")
def whole(tune: Tune, tmp_path_factory: pytest.TempPathFactory) -> FinetuneReport:
    """Return the report of the undisturbed call; its folder is copied by tests."""
    return tune(tmp_path_factory.mktemp("finetuned") / "whole")


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def copy_of(whole: FinetuneReport, folder: Path) -> Path:
    return Path(shutil.copytree(whole.folder, folder / "out"))


def same_end(found: FinetuneReport, whole: FinetuneReport) -> None:
    """The report and the records are those of the undisturbed call."""
    assert replace(found, folder=whole.folder) == whole
    assert records(Path(found.folder)) == records(Path(whole.folder))
    assert len(records(Path(found.folder))) == 3


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "training.safetensors",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("state.json", "config.json", "weights-*")
        ),
    ],
)
def test_a_damaged_latest_checkpoint_is_set_aside(
    name: str, tune: Tune, whole: FinetuneReport, tmp_path: Path
) -> None:
    out, said = copy_of(whole, tmp_path), io.StringIO()
    kept = steps(out)
    assert {"step-00000002", "step-00000003"} <= set(kept)
    (file,) = (out / "checkpoints/step-00000003").glob(name)
    damage(file) if file.suffix != ".json" else file.write_bytes(file.read_bytes()[:40])
    found = tune(out, Console(file=said, soft_wrap=True))
    (note,) = [line for line in said.getvalue().splitlines() if "going on from" in line]
    assert str(file) in note and "step-00000003.damaged-1, going on from step-00000002" in note
    assert steps(out) == sorted([*kept, "step-00000003.damaged-1"])
    same_end(found, whole)


def test_where_all_checkpoints_are_damaged_it_refuses(
    tune: Tune, whole: FinetuneReport, tmp_path: Path
) -> None:
    out = copy_of(whole, tmp_path)
    for file in out.rglob("training.safetensors"):
        damage(file)
    with pytest.raises(UserError, match=r"is damaged.*there is no earlier checkpoint") as stop:
        tune(out)
    assert "\n" not in str(stop.value)


def test_a_damaged_best_epoch_is_told(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = itertools.count(100, -10)  # of three epochs the first is the best
    monkeypatch.setattr(Finetuner, "accuracy", lambda self, split, progress: float(next(falling)))
    assert tune(tmp_path / "out").best_epoch == 1
    damage(tmp_path / "out/checkpoints/step-00000001/training.safetensors")
    with pytest.raises(UserError, match=r"epoch 1, the best, .*training.safetensors is damaged"):
        tune(tmp_path / "out")


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tune: Tune, whole: FinetuneReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, out, calls = acmoe.train.checkpoint, tmp_path / "out", []
    real = module.save_file

    def fails_at_the_second(*arguments: Any, **options: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fails_at_the_second)
        with pytest.raises(UserError, match=r"cannot write .*step-00000002: No space left") as stop:
            tune(out)
    assert "\n" not in str(stop.value)
    assert steps(out) == ["step-00000001"] and not list(out.rglob(".*"))
    same_end(tune(out), whole)


def test_a_record_that_is_written_in_part_does_not_stay(
    tune: Tune, whole: FinetuneReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out, calls = os.write, tmp_path / "out", []

    def short(handle: int, data: bytes) -> int:
        """The disk takes ten bytes of the second record, and nothing after them.

        The first write is the line of this start in starts.jsonl.
        """
        calls.append(None)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data[:10] if len(calls) == 3 else data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left"):
            tune(out)
    assert len(records(out)) == 1 and steps(out) == ["step-00000001"]
    same_end(tune(out), whole)
