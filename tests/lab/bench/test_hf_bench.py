"""`acmoe bench hf` on a tiny model."""

import json

import pytest

pytest.importorskip("transformers")

from acmoe.cli import main
from acmoe.errors import UserError
from acmoe.lab.bench.harness.table import cells
from acmoe.lab.bench.models import hf
from acmoe.lab.bench.models.hf import HfBenchConfig, bench_hf

TINY = ["--models", "tiny", "--layers", "1", "--tokens", "8", "--batches", "2", "--new_tokens", "2"]


def test_training_and_decoding_are_measured_and_compared_with_grouped_mm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "hf", *TINY, "--repeat", "2", "--device", "cpu", "--json"])
    assert stop.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["command"].startswith("acmoe bench hf --models tiny --tokens 8 --batches 2")
    rows = report["rows"]
    names = [(row["part"], row["implementation"]) for row in rows]
    every = ("acmoe", "grouped_mm", "eager")
    assert names == [(part, name) for part in ("train", "decode") for name in every]
    for base, row in [(rows[1], row) for row in rows[:3]] + [(rows[4], row) for row in rows[3:]]:
        assert row["refused"] is None and row["baseline"] == "grouped_mm"
        assert row["ratio"] == pytest.approx(base["ms"] / row["ms"])
        assert row["tokens"] == (8 if row["part"] == "train" else 2)
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["tokens"] / row["ms"])
    assert rows[0]["loss"] == pytest.approx(rows[2]["loss"], rel=1e-5)


def test_an_implementation_that_fails_or_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def negative(self, x, ids, gate):  # type: ignore[no-untyped-def]
        return -30 * x

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "negative", negative)
    config = HfBenchConfig(
        models=("tiny",),
        implementations=("grouped_mm", "negative", "nosuch"),
        tokens=64,
        batches=(),
        layers=1,
        repeat=2,
        device="cpu",
    )
    monkeypatch.setattr(hf, "_LOSS_TOLERANCE", 1e-5)
    report = bench_hf(config)
    good, other, unknown = report.rows
    assert good["ms"] > 0 and good["refused"] is None
    assert "its loss is" in other["refused"] and other["ms"] is None
    assert "nosuch" in unknown["refused"]
    assert [line[2] for line in cells(report)] == ["grouped_mm", "negative", "nosuch"]


def test_a_model_that_is_not_known_is_named() -> None:
    with pytest.raises(UserError, match="models='gpt-5' is unknown; choose one of qwen3-30b-a3b"):
        HfBenchConfig(models=("gpt-5",))
    with pytest.raises(UserError, match="batches holds 0; it must be at least 1"):
        HfBenchConfig(batches=(4, 0))
