"""An attack that was killed goes on from its journal, and nothing else is taken from there."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attack_cases import LABELS, SWEEP, sweep
from torch import nn

import acmoe.evaluate.images.attack as module
from acmoe.config.images.attack import PGDConfig
from acmoe.errors import UserError
from acmoe.evaluate.images.attack import evaluate_attack
from acmoe.evaluate.images.attack_journal import fingerprint, open_journal
from slow_cases import mostly_slow
from vision_cases import BATCH_STATISTICS, PLAIN, TinyMoE, random_images, seeded_model


@pytest.fixture
def tiny() -> nn.Module:
    return seeded_model(lambda: TinyMoE(BATCH_STATISTICS))


def count_attacks(monkeypatch: pytest.MonkeyPatch, *, stop_after: int | None = None) -> list[float]:
    """The radius of every batch attacked from now on; stops like a kill after some."""
    attacked: list[float] = []
    original = module.perturb

    def counted(*arguments: object, **options: object) -> torch.Tensor:
        if len(attacked) == stop_after:
            raise KeyboardInterrupt
        attacked.append(float(arguments[3]))  # type: ignore[arg-type]
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "perturb", counted)
    return attacked


@pytest.mark.parametrize(
    "stop_after", [4, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 1, 7))]
)
def test_a_killed_sweep_goes_on_and_ends_in_the_same_report(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    whole = sweep(tiny, None)
    with monkeypatch.context() as patch:
        count_attacks(patch, stop_after=stop_after)
        with pytest.raises(KeyboardInterrupt):
            sweep(tiny, tmp_path)
    attacked = count_attacks(monkeypatch)
    assert sweep(tiny, tmp_path) == whole
    assert len(attacked) == 8 - stop_after  # 4 batches for each of 2 radii
    assert sweep(tiny, tmp_path) == whole
    assert len(attacked) == 8 - stop_after  # all was there


def test_other_images_under_the_same_labels_are_not_in_the_journal(
    tiny: nn.Module, tmp_path: Path
) -> None:
    sweep(tiny, tmp_path)
    other = random_images(LABELS, seed=1)
    with pytest.raises(UserError, match="has other images than those attacked so far"):
        evaluate_attack(tiny, other, PLAIN, SWEEP, folder=tmp_path)


CHILD = """
import sys
from acmoe.evaluate.images.attack import evaluate_attack
from attack_cases import LABELS, SWEEP
from cpu import settle_cpu
from vision_cases import BATCH_STATISTICS, PLAIN, TinyMoE, random_images, seeded_model
settle_cpu()
model = seeded_model(lambda: TinyMoE(BATCH_STATISTICS))
tell = lambda *news: print(news, flush=True)
evaluate_attack(model, random_images(LABELS), PLAIN, SWEEP, folder=sys.argv[1], progress=tell)
"""


@pytest.mark.slow
def test_a_process_killed_at_once_leaves_a_journal_that_goes_on(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as child:
        assert child.stdout is not None
        for _ in range(1 + 3 * 2 + 1):  # none done, two steps of three batches, one of the fourth
            assert child.stdout.readline()
        child.kill()
    attacked = count_attacks(monkeypatch)
    assert sweep(tiny, tmp_path) == sweep(tiny, None)
    assert len(attacked) <= 5 + 8


@pytest.mark.parametrize(
    "share",
    [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 0.1, 0.77, 0.99))],
)
def test_a_journal_cut_off_anywhere_is_continued(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    whole = sweep(tiny, tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    attacked = count_attacks(monkeypatch)
    assert sweep(tiny, tmp_path) == whole
    assert 0 < len(attacked) <= 8
    assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())


def test_more_radii_add_to_what_is_there(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(tiny, tmp_path)
    attacked = count_attacks(monkeypatch)
    more = replace(SWEEP, eps=(0.1, 0.3))
    report = evaluate_attack(tiny, random_images(LABELS), PLAIN, more, folder=tmp_path)
    assert attacked == [0.3] * 4
    assert report == evaluate_attack(tiny, random_images(LABELS), PLAIN, more)


@mostly_slow(
    "change", ["weights", "labels", "batch", "seed", "attack", "limit", "statistics"], keep=(0,)
)
def test_nothing_is_reused_once_anything_changed(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sweep(tiny, tmp_path)
    config, labels = SWEEP, LABELS
    if change == "weights":
        with torch.no_grad():
            tiny.head.bias[0] += 1
    elif change == "labels":
        labels = LABELS[::-1]
    else:
        other = {
            "batch": {"batch": 10},
            "seed": {"seed": 1},
            "attack": {"attack": PGDConfig(steps=1)},
            "limit": {"limit": 29},
            "statistics": {"statistics": "running"},
        }
        config = replace(SWEEP, **other[change])
    attacked = count_attacks(monkeypatch)
    evaluate_attack(tiny, random_images(labels), PLAIN, config, folder=tmp_path)
    assert len(attacked) == 2 * math.ceil((config.limit or 30) / config.batch)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_or_foreign_journal_is_refused(tiny: nn.Module, tmp_path: Path) -> None:
    sweep(tiny, tmp_path)
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{torn\n", *lines[1:]]))
    with pytest.raises(UserError, match=r"\.jsonl is damaged .*; delete it to attack anew"):
        sweep(tiny, tmp_path)
    path.write_bytes(b'{"attack": "other"}\n' + b"".join(lines[1:]))
    with pytest.raises(UserError, match="was begun with other settings; delete it"):
        sweep(tiny, tmp_path)


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    settings = {"attack": {"name": "pgd"}}
    with (
        open_journal(tmp_path, settings),
        pytest.raises(UserError, match="in use by another process"),
        open_journal(tmp_path, settings),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, tiny: nn.Module) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*attack-pgd-.*\.jsonl"):
        sweep(tiny, tmp_path / "file")


def test_a_fingerprint_is_of_the_weights_alone() -> None:
    first, again, other = (
        seeded_model(lambda: TinyMoE(BATCH_STATISTICS), seed=seed) for seed in (0, 0, 1)
    )
    assert fingerprint(first) == fingerprint(again.train()) != fingerprint(other)
