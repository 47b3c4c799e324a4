"""A cell of each kind records its measures, on models of a few thousand weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from acmoe.config.images.attack import attack_config
from acmoe.config.text.finetune import FinetuneConfig
from acmoe.errors import UserError
from acmoe.lab.study.cell import Cell, ImageTests, TextTests
from acmoe.lab.study.cells.outcome import curve_mean, step_milliseconds
from acmoe.lab.study.cells.scale_statistics import scale_statistics
from acmoe.lab.study.grids.text import TextSetting, text_cells
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.size import Size
from acmoe.lab.study.synthetic.task import SyntheticConfig
from acmoe.lab.study.worker import run_cell, runner_of
from study_cases import SMALL, tiny_cells, tiny_text
from tiny_runs import MODEL
from tiny_vision_runs import tiny_vision_run


def silent(text):
    pass


def test_a_cell_is_the_same_numbers_again(tmp_path):
    (cell,) = tiny_cells(tiny_text(tmp_path), "adaptive-current", seeds=(5,))
    first, second = (run_cell(cell, tmp_path, silent) for _ in range(2))
    clock = ("step_ms", "train_seconds", "seconds")
    for found in (first, second):
        for name in clock:
            assert found["metrics"].pop(name) > 0
    assert first == second
    assert first["details"]["scored"] == {
        "statistics": "batch",
        "rows": 2,
        "block": 16,
        "tokens": 199,
    }
    assert [path.name for path in tmp_path.glob("acmoe-study-*")] == []  # thrown away


def test_words_are_scored_twice_and_finetuned(tmp_path):
    source = tmp_path / "data"
    for name in ("enwiki15-words", "wikitext103", "sst2"):
        (source / name).mkdir(parents=True)
    for split, count in (("train_00", 80), ("train_01", 9), ("valid", 20), ("test", 20)):
        lines = [f"the red cat number {n % 7} saw {n % 5} dogs" for n in range(count)]
        (source / "enwiki15-words" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    (source / "wikitext103" / "wiki.valid.tokens").write_text("the <unk> cat saw\n" * 20)
    for split in ("train", "dev", "test"):
        rows = [f"the cat {'saw' if n % 2 else 'red'}\t{n % 2}" for n in range(12)]
        (source / "sst2" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    materials = Materials(data=source, work=tmp_path / "work")
    text = materials.words(1, 20)
    other = materials.other_words(text)
    tests = TextTests(
        rows=2,
        others=(("wikitext103", str(other)),),
        tasks=(FinetuneConfig(task="sst2", epochs=1, lr=1e-3),),
        task_folder=str(materials.tasks(("sst2",))),
    )
    model = replace(MODEL, vocab_size=text.vocab_size)
    size = Size(steps=3, batch=2, overrides=SMALL, device="cpu")
    setting = TextSetting(study="words", name="tiny", model=model, text=text, tests=tests)
    (cell,) = text_cells(setting, {"smoe": "smoe"}, size, (0,))
    record = run_cell(cell, None, silent)
    metrics = record["metrics"]
    # 20 lines of 4 words and the end of line, each unknown word one <unk>.
    assert len(np.load(other)) == 100
    assert metrics["test"] > 1
    assert metrics["wikitext103"] > 1
    assert metrics["contaminated"] > 1
    (told,) = record["details"]["tasks"]
    assert (told["test_accuracy"], told["majority"]) == (metrics["sst2"], 50)
    assert told["sentences"] == {"train": 12, "dev": 12, "test": 12}
    assert told["folder"] == ""  # thrown away, and a place of this machine
    with pytest.raises(UserError, match="--parts 3, but"):
        materials.words(3, 20)


def test_words_are_found_again_where_the_data_folder_was_moved(tmp_path):
    """The prepared source has links to the texts; they follow --data, and the corpus stays."""
    folder = tmp_path / "data" / "enwiki15-words"
    folder.mkdir(parents=True)
    for split in ("train_00", "valid", "test"):
        (folder / f"{split}.txt").write_text("the red cat\n" * 9)
    before = Materials(data=tmp_path / "data", work=tmp_path / "work").words(1, 20)
    (tmp_path / "data").rename(tmp_path / "moved")
    after = Materials(data=tmp_path / "moved", work=tmp_path / "work").words(1, 20)
    assert after == before
    links = list((tmp_path / "work" / "words-1-source").iterdir())
    assert {link.readlink().parent for link in links} == {tmp_path / "moved" / "enwiki15-words"}
    assert len(links) == 3


def test_images_are_scored_and_attacked(tmp_path):
    attacks = (
        replace(attack_config("fgsm"), limit=8, batch=8),
        replace(attack_config("pgd", preset="paper", eps=(1 / 255, 2 / 255)), limit=8, batch=8),
    )
    cell = Cell(
        study="vision",
        setting="tiny",
        condition="adaptive-previous",
        seed=0,
        size="6 steps",
        data="digits",
        config=tiny_vision_run("steps=6"),
        tests=ImageTests(batch=16, images=32, attacks=attacks),
    )
    record = run_cell(cell, None, silent)
    for name in ("test", "fgsm 1/255", "pgd-paper 1/255", "pgd-paper 2/255"):
        assert 0 <= record["metrics"][name] <= 100
    assert record["metrics"]["scale_rms_log"] > 0
    assert record["details"]["scored"]["images"] == 32
    assert [found["images"] for found in record["details"]["attacks"]] == [8, 8]
    assert record["metrics"]["valid"] == record["curves"]["valid"][-1][1]


def test_a_synthetic_cell_gives_its_curves_by_step():
    config = SyntheticConfig(steps=4, eval_every=2, held_out=64)
    cell = Cell(
        study="synthetic",
        setting="tiny",
        condition="smoe",
        seed=0,
        size="4 steps",
        data="drawn",
        config=config,
    )
    record = run_cell(cell, None, silent)
    assert [step for step, _ in record["curves"]["loss"]] == [0, 2, 4]
    assert record["metrics"]["loss"] == record["curves"]["loss"][-1][1]


def test_a_config_without_a_runner_is_named():
    with pytest.raises(UserError, match="no runner for a str"):
        runner_of("nothing")


def test_the_parts_of_log_m_are_told_apart():
    # log M is (a, -a) in both clusters: all common. Then (b, -b) and (-b, b): all own. The third
    # cluster is empty and does not count.
    a, b = 0.5, 0.25
    occupied = torch.tensor([True, True, False])
    common = torch.tensor([[a, -a], [a, -a], [9.0, 9.0]]).exp()
    assert scale_statistics(common, occupied) == pytest.approx((a, 1.0, 2))
    own = torch.tensor([[b, -b], [-b, b], [9.0, 9.0]]).exp()
    assert scale_statistics(own, occupied) == pytest.approx((b, 0.0, 2), abs=1e-7)
    both = torch.tensor([[a + b, -a - b], [a - b, b - a], [1.0, 1.0]]).exp()
    expected = (a * a + b * b) ** 0.5
    assert scale_statistics(both, occupied) == pytest.approx((expected, 0.8, 2), rel=1e-6)
    assert scale_statistics(torch.ones(3, 2), occupied) == (0.0, 0.0, 2)
    assert scale_statistics(common, torch.zeros(3, dtype=torch.bool)) == (0.0, 0.0, 0)


def test_the_mean_of_a_curve_weighs_its_steps():
    # From 4 to 2 over 10 steps, mean 3; then 2 to 1 over 30, mean 1.5: (30 + 45) / 40.
    assert curve_mean([(10, 4.0), (20, 2.0), (50, 1.0)]) == 1.875
    assert curve_mean([(10, 4.0)]) == 4.0


def test_a_step_takes_the_median_time_without_the_first_line():
    lines = [{"tokens_per_second": speed} for speed in (10.0, 1000.0, 2000.0, 4000.0)]
    assert step_milliseconds(lines, "tokens", 100) == 50.0
    assert step_milliseconds(lines[:1], "tokens", 100) == 10_000.0
