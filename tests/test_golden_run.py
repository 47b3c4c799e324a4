"""Runs and models that version 0.1.0 wrote load today, give its numbers, and go on as it did.

tests/golden/make.py wrote the folders. Tests work on a copy.

The runs have two micro-batches per step. Version 0.1.0 took the running statistics of a step from
the last one alone; today all micro-batches count. Where the old rule is put back, a continued run
ends with the numbers of version 0.1.0; where it is not, it differs from the second step on.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acmoe
from acmoe.cli import main
from acmoe.routing import statistics
from golden.make import LANGUAGE, SWIN, images

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
TOKENS = torch.tensor(EXPECTED["tokens"])
HALFWAY = "checkpoints/step-00000004"


@pytest.fixture(autouse=True)
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a copy; the config of the language run names its corpus from there."""
    for name in ("corpus", "language", "models", "swin"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert not stop.value.code


def evaluated(capsys: pytest.CaptureFixture[str], folder: str) -> dict[str, Any]:
    """The last checkpoint's report, as `acmoe evaluate` prints it."""
    capsys.readouterr()
    # Version 0.1.0 scored images with the experts' capacity of training.
    limited = ("--capacity", "model") if folder == "swin" else ()
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


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        (f"language/{HALFWAY}", EXPECTED["language"]),
        (f"swin/{HALFWAY}", EXPECTED["swin"]),
        ("models/prefix", EXPECTED["models"]["prefix"]),
        ("models/mix", EXPECTED["models"]["mix"]),
    ],
    ids=["language", "swin", "prefix", "mix"],
)
@torch.no_grad()
def test_a_saved_model_gives_the_logits_it_gave(folder: str, expected: dict[str, Any]) -> None:
    model = acmoe.load(folder).eval()
    logits = model(images()).logits if "swin" in folder else model(TOKENS).logits[:, -1]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-5, atol=1e-5)


def overwrite(mean: Tensor, count: Tensor, new: Tensor, new_count: Tensor, *, least: int) -> None:
    """The rule of version 0.1.0 in place of `record_batch`: the last micro-batch counts."""
    mean.copy_(new)
    count.copy_(new_count)


@pytest.mark.parametrize(("name", "settings"), [("language", LANGUAGE), ("swin", SWIN)])
def test_a_run_goes_on_to_the_end_it_had(
    name: str,
    settings: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "record_batch", overwrite)
    expected = EXPECTED[name]
    assert near(comparable(expected["halfway"])) == evaluated(capsys, name)
    run("train", *settings.split(), "--out", name)  # the same command continues it
    records = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 10  # 8 steps and 2 validations
    same = len(records)
    if name == "swin":  # the last validation is of today: no token is dropped
        assert (records[-1]["kind"], records[-1]["capacity"]) == ("valid", None)
        same -= 1
    assert near(losses(expected["records"][:same])) == losses(records[:same])
    assert near(comparable(expected["final"])) == evaluated(capsys, name)


def test_a_run_with_all_micro_batches_counted_leaves_the_old_path_after_one_step() -> None:
    run("train", *LANGUAGE.split(), "--out", "language")
    lines = Path("language", "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    old = {one["step"]: one["loss"] for one in EXPECTED["language"]["records"]}
    change = {one["step"]: abs(one["loss"] - old[one["step"]]) for one in found}
    # Step 5 routes by the averages of the checkpoint, step 6 by the first that is updated today.
    assert change[5] < 1e-5
    assert 1e-5 < change[8] < 0.05
