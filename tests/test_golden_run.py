"""Runs and models of every released version load today, give their numbers, resume and report.

Folder tests/golden/VERSION holds what that version wrote by tests/golden/make.py (`make golden`).
Tests work on a copy.

The runs have two micro-batches per step. Version 0.1.0 took the running statistics of a step from
the last one alone; today all micro-batches count. Where the old rule is put back, a continued run
ends with the numbers of version 0.1.0; where it is not, it differs from the second step on.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acmoe
import release
from acmoe.cli import main
from acmoe.ops.statistics import recorded
from golden.make import LANGUAGE, SWIN, images

GOLDEN = Path(__file__).parent / "golden"
FIRST = "0.1.0"
VERSIONS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
HALFWAY = "checkpoints/step-00000004"

every_version = pytest.mark.parametrize("version", VERSIONS)


def enter(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Work in a copy, from where the language run finds its corpus; return what is expected."""
    shutil.copytree(GOLDEN / version, folder / version)
    monkeypatch.chdir(folder / version)
    expected = json.loads(Path("expected.json").read_text())
    assert expected["version"].startswith(version)
    return dict(expected)


def test_every_released_version_has_its_golden_folder() -> None:
    changelog = (GOLDEN.parents[1] / "CHANGELOG.md").read_text()
    dates = {version: date for version, (date, _) in release.sections(changelog).items()}
    released = {version for version, date in dates.items() if date != release.OPEN}
    # A release makes its own after it is tagged: `make golden`, step 4 in CONTRIBUTING.md.
    assert released - {acmoe.__version__} <= set(VERSIONS)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert not stop.value.code


def evaluated(capsys: pytest.CaptureFixture[str], folder: str, version: str) -> dict[str, Any]:
    """The last checkpoint's report, as `acmoe evaluate` prints it."""
    capsys.readouterr()
    # Version 0.1.0 scored images with the experts' capacity of training.
    limited = ("--capacity", "model") if (version, folder) == (FIRST, "swin") else ()
    run("evaluate", folder, "--which", "last", "--json", "--device", "cpu", *limited)
    return comparable(json.loads(capsys.readouterr().out))


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    """Without accuracies, which the rounding of one image near a tie would change."""
    figures = [
        {key: value for key, value in figure.items() if key not in ("top1", "top5")}
        for figure in report["figures"]
    ]
    return {**report, "figures": figures}


def losses(records: list[dict[str, Any]]) -> list[list[Any]]:
    return [[one["kind"], one["step"], one["loss"]] for one in records]


def near(expected: Any) -> Any:
    """The same document with room for rounding in every number of it."""
    if isinstance(expected, dict):
        return {key: near(value) for key, value in expected.items()}
    if isinstance(expected, list):
        return [near(value) for value in expected]
    return pytest.approx(expected, rel=1e-5, abs=1e-5) if isinstance(expected, float) else expected


@every_version
@pytest.mark.parametrize("name", ["language", "swin", "prefix", "mix"])
@torch.no_grad()
def test_a_saved_model_gives_the_logits_it_gave(
    name: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = enter(version, tmp_path, monkeypatch)
    is_run = name in ("language", "swin")
    model = acmoe.load(f"{name}/{HALFWAY}" if is_run else f"models/{name}").eval()
    tokens = torch.tensor(expected["tokens"])
    logits = model(images()).logits if name == "swin" else model(tokens).logits[:, -1]
    gave = (expected if is_run else expected["models"])[name]["logits"]
    torch.testing.assert_close(logits, torch.tensor(gave), rtol=1e-5, atol=1e-5)


@every_version
def test_runs_are_reported(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = enter(version, tmp_path, monkeypatch)
    run("report", "language", "swin", "-o", "report.html", "--tokens", "32", "--device", "cpu")
    page = Path("report.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    runs = json.loads(text)["runs"]
    assert [one["name"] for one in runs] == ["language", "swin"]
    for one in runs:
        valid = [r for r in expected[one["name"]]["records"] if r["kind"] == "valid"]
        # That of step 4; the page has six digits.
        assert one["valid"]["loss"] == [pytest.approx(valid[0]["loss"], rel=1e-5)]
        assert one["routing"] is not None


def overwrite(mean: Tensor, count: Tensor, new: Tensor, new_count: Tensor, *, least: int) -> None:
    """The rule of version 0.1.0 in place of `record_batch`: the last micro-batch counts."""
    mean.copy_(new)
    count.copy_(new_count)


@every_version
@pytest.mark.parametrize(("name", "settings"), [("language", LANGUAGE), ("swin", SWIN)])
def test_a_run_goes_on_to_the_end_it_had(
    name: str,
    settings: str,
    version: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = enter(version, tmp_path, monkeypatch)[name]
    if version == FIRST:
        monkeypatch.setattr(recorded, "record_batch", overwrite)
        monkeypatch.setattr(recorded, "_added_on_cpu", lambda pending: False)
    assert near(comparable(expected["halfway"])) == evaluated(capsys, name, version)
    run("train", *settings.split(), "--out", name)  # the same command continues it
    records = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 10  # 8 steps and 2 validations
    same = len(records)
    if (version, name) == (FIRST, "swin"):  # the last validation is of today: no token is dropped
        assert (records[-1]["kind"], records[-1]["capacity"]) == ("valid", None)
        same -= 1
    assert near(losses(expected["records"][:same])) == losses(records[:same])
    assert near(comparable(expected["final"])) == evaluated(capsys, name, version)


def test_a_run_with_all_micro_batches_counted_leaves_the_old_path_after_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = enter(FIRST, tmp_path, monkeypatch)
    run("train", *LANGUAGE.split(), "--out", "language")
    lines = Path("language", "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    old = {one["step"]: one["loss"] for one in expected["language"]["records"]}
    change = {one["step"]: abs(one["loss"] - old[one["step"]]) for one in found}
    # Step 5 routes by the averages of the checkpoint, step 6 by the first that is updated today.
    assert change[5] < 1e-5
    assert 1e-5 < change[8] < 0.05
