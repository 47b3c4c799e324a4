"""`acmoe train`, `evaluate` and `attack` on images: what they print, save, and refuse."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from acmoe.cli.run.options import capacity_option
from acmoe.errors import UserError
from acmoe.evaluate.images.attack_journal import AttackJournal
from command import acmoe
from slow_cases import mostly_slow
from tiny_runs import byte_corpus, tiny_run, trained
from tiny_vision_runs import tiny_vision_run, trained_images

SMALL = (
    *("model.image_size=16", "data.size=16", "model.dim=8", "model.depths=2,4,2"),
    *("model.num_experts=4", "steps=3", "warmup=0", "batch=8", "eval_images=20", "device=cpu"),
)


@pytest.fixture(scope="module")
def vision_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    return trained_images(tiny_vision_run("steps=4", "augment.mixup=0"), folder / "run")


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return trained_images(tiny_vision_run("steps=1", router="smoe"), folder / "run")


@pytest.fixture(scope="module")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    return trained(tiny_run(byte_corpus(folder), "steps=1"), folder / "run")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line a mistake is answered with."""
    capsys.readouterr()
    assert acmoe(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1 and shown.err.startswith("acmoe: ")
    return shown.err


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert acmoe(*arguments, "--json", "--device", "cpu") == 0
    return json.loads(capsys.readouterr().out)


@mostly_slow("recipe", ["swin-nano-acmoe", "swin-nano"])
def test_train_runs_a_recipe_by_its_name(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acmoe("train", recipe, *SMALL, "--out", tmp_path / "run") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("done: 3 steps in ")
    assert "best validation top-1 (%)" in shown.out
    assert "images/s" in shown.err and "validation top-1 accuracy" in shown.err
    assert found(capsys, "evaluate", tmp_path / "run")["step"] == 3
    # The same command again finds nothing left to do.
    assert acmoe("train", recipe, *SMALL, "--out", tmp_path / "run") == 0
    assert "continuing after step 3" in capsys.readouterr().err


def test_evaluate_gives_accuracy_in_every_statistics_mode_asked_for(
    vision_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = ("--statistics", "running", "batch")
    report = found(capsys, "evaluate", vision_run, *modes, "--routing")
    assert [figure["statistics"] for figure in report["figures"]] == ["running", "batch"]
    assert (report["data"], report["split"], report["batch"]) == ("digits", "test", 64)
    for figure in report["figures"]:
        assert 0 <= figure["top1"] <= figure["top5"] <= 100
        assert len(figure["layers"]) == 3
    assert report["capacity"] is None
    assert acmoe("evaluate", vision_run, "--split", "valid", "--routing") == 0
    shown = capsys.readouterr().out
    assert "top-1 (%)" in shown and "capacity none" in shown and "load balance" in shown
    assert acmoe("evaluate", vision_run, "--capacity", "1.25") == 0
    assert "capacity 1.25 (the paper's)" in capsys.readouterr().out
    assert found(capsys, "evaluate", vision_run, "--capacity", "model")["capacity"] == 1.25
    with pytest.warns(FutureWarning, match="--dropless is now --capacity none, the default"):
        assert found(capsys, "evaluate", vision_run, "--dropless")["capacity"] is None
    with pytest.raises(UserError, match=r"--dropless beside --capacity 1\.25: it means"):
        capacity_option("1.25", dropless=True)


def test_evaluate_of_a_language_run_is_as_before(
    language_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = found(capsys, "evaluate", language_run)
    assert (report["metric"], report["batch"]) == ("bits per byte", 8)


def test_attack_prints_a_table_and_saves_what_it_found(
    vision_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    radii = ("--eps", "1/255", "8/255")
    limits = ("--limit", "40", "--batch", "20")
    assert acmoe("attack", vision_run, "--attack", "fgsm", *radii, *limits) == 0
    shown = capsys.readouterr().out
    for part in ("1/255", "8/255", "clean top-1", "attacked top-5", "tokens moved", "running"):
        assert part in shown
    assert "capacity none" in " ".join(shown.split())
    (saved,) = (vision_run / "attacks").glob("report-fgsm-*.json")
    assert str(saved) in shown
    report = found(capsys, "attack", vision_run, "--attack", "fgsm", *radii, *limits)
    assert json.loads(saved.read_text()) == report
    assert (report["images"], report["space"], report["labels"]) == (40, "pixel", "true")
    assert [figure["eps"] for figure in report["figures"]] == [1 / 255, 8 / 255]


def test_a_killed_attack_continues_with_the_batches_left(
    plain_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("attack", plain_run, "--attack", "pgd", "--steps", "2", "--eps", "2/255")
    limits = ("--limit", "24", "--batch", "8")
    add, written = AttackJournal.add, []

    def killed(self: AttackJournal, record: dict[str, Any]) -> None:
        add(self, record)
        written.append(record["batch"])
        if len(written) == 2:
            del self.done[record["eps"], record["batch"]]  # as if ctrl-C came before it was noted
            raise KeyboardInterrupt

    monkeypatch.setattr(AttackJournal, "add", killed)
    assert acmoe(*command, *limits) == 130
    (journal,) = (plain_run / "attacks").glob("attack-pgd-*.jsonl")
    assert capsys.readouterr().err.endswith(
        f"acmoe: interrupted; 2 of 3 batches are saved in {journal}; give the same command again "
        "to continue\n"
    )
    monkeypatch.setattr(
        AttackJournal,
        "add",
        lambda self, record: (written.append(record["batch"]), add(self, record)),
    )
    assert acmoe(*command, *limits) == 0
    assert written == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "space", "eps"),
    [
        (("fgsm",), "normalized", [1 / 255]),
        pytest.param(("pgd", "--steps", "1"), "normalized", [1 / 255], marks=pytest.mark.slow),
        (("spsa", "--steps", "1", "--directions", "2"), "normalized", [1.0]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_papers_preset_attacks_as_the_papers_figures_were_made(
    options: tuple[str, ...],
    space: str,
    eps: list[float],
    plain_run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attack = ("attack", plain_run, "--attack", *options, "--preset", "paper", "--limit", "8")
    report = found(capsys, *attack)
    assert (report["space"], report["clamp"], report["labels"]) == (space, False, "predicted")
    assert report["capacity"] == 1.25
    assert [figure["eps"] for figure in report["figures"]] == eps


def test_mistakes_in_training_are_one_line_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "did you mean swin-nano" in refused(capsys, "train", "swin-nan")
    assert "did you mean lr" in refused(capsys, "train", "swin-nano", "lrr=1")
    assert "batch='many'" in refused(capsys, "train", "swin-nano", "batch=many")
    assert "data/imagenet" in refused(capsys, "train", "swin-small")
    lacking = refused(capsys, "train", "swin-nano", "data.name=folder")
    assert "data.source=None" in lacking
    assert "model.image_size=32" in refused(capsys, "train", "swin-nano", "data.size=64")
    assert not list(tmp_path.iterdir())  # a refused run leaves no folder behind


def test_a_folder_is_refused_before_data_are_prepared_for_it(
    vision_run: Path,
    language_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    other = refused(capsys, "train", "switch-nano", "--out", vision_run)
    assert "holds a swin-run, not a language-run; choose another folder" in other
    assert "was begun with" in refused(capsys, "train", "switch-nano", "--out", language_run)
    assert "mine holds notes" in refused(capsys, "train", "switch-nano", "--out", "mine")
    file = refused(capsys, "train", "switch-nano", "--out", "mine/notes/run")
    assert "cannot write into mine/notes/run: mine/notes is no folder" in file
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes"]  # no data


def test_runs_of_the_wrong_kind_are_refused_by_every_command(
    vision_run: Path,
    plain_run: Path,
    language_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attack = ("--attack", "fgsm")
    assert "is a language-run" in refused(capsys, "attack", language_run, *attack)
    assert "is no run" in refused(capsys, "attack", tmp_path, *attack)
    image = "is a run of an image model (swin-run)"
    assert image in refused(capsys, "generate", vision_run, "--prompt", "a")
    assert image in refused(capsys, "finetune", vision_run, "--task", "sst2", "--data", tmp_path)
    assert "is for text" in refused(capsys, "evaluate", vision_run, "--contaminate", "0.1")
    assert "is for text" in refused(capsys, "evaluate", vision_run, "--block", "8")
    assert "is for images" in refused(capsys, "evaluate", language_run, "--capacity", "none")
    assert "is for images" in refused(capsys, "evaluate", language_run, "--ema")
    assert "capacity='much'" in refused(capsys, "evaluate", vision_run, "--capacity", "much")
    assert "no moving average" in refused(capsys, "evaluate", vision_run, "--ema")
    no_router = refused(capsys, "evaluate", plain_run, "--statistics", "batch")
    assert "no adaptive router" in no_router


def test_mistakes_in_an_attack_are_one_line_and_2(
    plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*options: str) -> str:
        return refused(capsys, "attack", plain_run, *options)

    assert "eps='1/0' is no number" in said("--attack", "fgsm", "--eps", "1/0")
    limits = "it must be above 0 and at most 1, the range of pixels"
    whole = said("--attack", "fgsm", "--eps", "8")
    assert whole == f"acmoe: eps=8; {limits}; did you mean 8/255?\n"
    levels = said("--attack", "fgsm", "--eps", "300/255")
    assert levels == f"acmoe: eps=1.17647 (300/255); {limits}\n"
    assert said("--attack", "fgsm", "--eps", "1e300") == f"acmoe: eps=1e+300; {limits}\n"
    assert "fgsm takes no --steps (3)" in said("--attack", "fgsm", "--steps", "3")
    assert "pgd takes no --directions" in said("--attack", "pgd", "--directions", "3")
    assert "fgsm takes no --allow-coupled" in said("--attack", "fgsm", "--allow-coupled")
    assert "capacity=none" in said("--attack", "autoattack", "--capacity", "1.25")
    assert "limit=9999 exceeds" in said("--attack", "fgsm", "--limit", "9999")
    assert "carlini" in said("--attack", "carlini")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["swin-nano", "swin-nano-acmoe"])
def test_the_nano_recipe_reads_nine_digits_of_ten_and_an_attack_unlearns_them(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.perf_counter()
    assert acmoe("train", recipe, "device=cpu", "--out", tmp_path / "run") == 0
    assert time.perf_counter() - start < 180
    report = found(capsys, "evaluate", tmp_path / "run")
    assert report["figures"][0]["top1"] >= 90
    radii = ("--eps", "1/255", "4/255", "8/255", "16/255")
    attacked = found(capsys, "attack", tmp_path / "run", "--attack", "fgsm", *radii)
    tops = [attacked["clean_top1"], *(figure["top1"] for figure in attacked["figures"])]
    assert tops == sorted(tops, reverse=True) and tops[-1] < tops[0] / 2
    moved = [sum(figure["moved"]) for figure in attacked["figures"]]
    assert moved == sorted(moved)
