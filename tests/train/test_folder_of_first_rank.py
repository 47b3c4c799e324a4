"""The first process owns the run folder, which other machines may not have, and warns."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acmoe import UserError
from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.evaluate.images.run import evaluate_image_run
from acmoe.evaluate.run import ImageRun
from acmoe.train import run
from tiny_vision_runs import tiny_vision_run

CPU = torch.device("cpu")


class DataReachedError(Exception):
    pass


def reach(*_: object) -> None:
    raise DataReachedError


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_process_refuses_a_folder_of_somebody_else(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    monkeypatch.setattr(run, "checked_corpus", reach)
    ranks: Any = SimpleNamespace(first=first, first_before_others=nullcontext)
    unused: Any = None
    with pytest.raises(UserError if first else DataReachedError):
        run._train_text(unused, tmp_path, unused, unused, ranks, unused)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_warns_of_files_that_are_not_read(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[bool] = []

    def load(data: object, *, warn: bool) -> None:
        warned.append(warn)
        raise DataReachedError

    ranks: Any = SimpleNamespace(first=rank == 0, first_before_others=nullcontext)
    monkeypatch.setattr(run, "joined", lambda *_: nullcontext((ranks, CPU)))
    monkeypatch.setattr(run, "load_images", load)
    monkeypatch.setattr("acmoe.evaluate.run.load_images", load)
    config = tiny_vision_run("data.name=folder", f"data.source={tmp_path}")
    with pytest.raises(DataReachedError):
        run.train_images(config, tmp_path / "run")
    opened = ImageRun(folder=tmp_path / "run", config=config)
    with pytest.raises(DataReachedError):
        evaluate_image_run(opened, ImageEvaluateConfig(), ranks=ranks)
    assert warned == [rank == 0, rank == 0]
