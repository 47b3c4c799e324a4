"""The demonstration: two routers, one difference, no winner from one seed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from acmoe.config.serialize import differences
from acmoe.config.text.train import RunConfig
from acmoe.errors import UserError
from acmoe.evaluate.run import open_run
from acmoe.recipes.nano import nano_run
from acmoe.train.side_by_side import compare as module
from acmoe.train.side_by_side.compare import compare


def test_both_routers_are_trained_and_scored_on_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(*names: str) -> RunConfig:
        run = nano_run(*names)
        small = {"dim": 32, "hidden": 32, "heads": 2, "span": 64, "block": 64, "repeats": 2}
        return replace(run, batch=2, model=replace(run.model, **small))

    monkeypatch.setattr(module, "CORPUS_BYTES", 12_000)
    monkeypatch.setattr(module, "nano_run", small)
    result = compare(tmp_path, seed=3, steps=20, console=Console(quiet=True))
    assert [row.router for row in result.rows] == ["SMoE", "ACMoE"]
    for row in result.rows:
        assert 3 < row.bits_per_byte < 9  # 8 is knowing nothing
        assert row.contaminated > 3
        assert 0 <= row.instability <= 1 and 0 < row.chance < 1
        assert row.seconds_per_step > 0
    assert [curve.steps for curve in result.curves] == [tuple(range(2, 21, 2))] * 2
    smoe, acmoe = (open_run(tmp_path / name).config for name in ("smoe", "acmoe"))
    assert differences(smoe, acmoe) == ["model.router.name=smoe, not adaptive"]
    assert (result.test_tokens, result.tokens) == (599, 20 * 2 * 64)
    assert 0.03 < result.replaced < 0.07
    again = compare(tmp_path, seed=3, steps=20, console=Console(quiet=True))
    assert again == result
    stored = json.loads(json.dumps(result.to_json()))
    assert "not which is better" in stored["verdict"]
    difference = result.rows[1].bits_per_byte - result.rows[0].bits_per_byte
    assert f"{difference:+.4f} bits per byte on clean text" in result.verdict


def test_too_few_steps_for_a_curve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fewer than 20 steps show no curve"):
        compare(tmp_path, steps=3)
