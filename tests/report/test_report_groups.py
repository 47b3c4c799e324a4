"""Seeds of one configuration: their means, spreads and paired differences, by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acmoe.report.compare import paired
from acmoe.report.content import settings_rows
from acmoe.report.groups import conditions, groups
from acmoe.report.runs import RunFacts
from acmoe.storage.sealed import write_sealed
from run_facts import run_facts, scored


def seeds_of(router: str, values: tuple[float, ...], **more: Any) -> list[RunFacts]:
    return [
        run_facts({1: value + 1, 2: value, 3: value + 0.5}, seed=seed, router=router, **more)
        for seed, value in enumerate(values)
    ]


def test_seeds_of_one_configuration_have_mean_deviation_and_number() -> None:
    runs = [*seeds_of("smoe", (2.0, 3.0, 4.0)), *seeds_of("adaptive", (1.0, 2.0))]
    first, second = (one.to_json(runs) for one in conditions(runs))
    assert (first["name"], first["runs"], first["seeds"]) == ("smoe", [0, 1, 2], [0, 1, 2])
    assert first["best"] == {"n": 3, "mean": 3.0, "std": 1.0}
    assert first["last"] == {"n": 3, "mean": 3.5, "std": 1.0}
    assert first["test"] is None
    assert second["best"] == {"n": 2, "mean": 1.5, "std": pytest.approx(math.sqrt(0.5))}


def test_an_unfinished_run_and_a_second_run_of_a_seed_are_counted_and_left_out() -> None:
    unfinished, again = run_facts({1: 9.0}, seed=7, steps=50), run_facts({1: 9.0}, seed=1)
    runs = [*seeds_of("smoe", (2.0, 4.0)), unfinished, again]
    (only,) = (one.to_json(runs) for one in conditions(runs))
    assert only["best"]["mean"] == 3.0
    assert (only["seeds"], only["unfinished"], only["repeated"]) == ([0, 1], 1, 1)


def test_configurations_with_one_router_are_named_by_what_differs() -> None:
    runs = [
        run_facts({1: 1.0}, seed=seed, router="adaptive", lr=lr, **{"model.router.measure": one})
        for lr, one in ((0.1, "mad"), (0.1, "std"), (0.2, "mad"))
        for seed in (0, 1)
    ]
    assert [one.name for one in conditions(runs)] == [
        "adaptive, lr=0.1, measure=mad",
        "adaptive, lr=0.1, measure=std",
        "adaptive, lr=0.2, measure=mad",
    ]
    assert [one.group for one in conditions(runs)] == [0, 0, 1]


def test_test_scores_of_paired_seeds_have_the_t_interval() -> None:
    plain = [run_facts({1: 9.0}, seed=n, tested=(scored(v),)) for n, v in enumerate((2, 3, 4))]
    other = [
        run_facts({1: 9.0}, seed=n, router="adaptive", tested=(scored(v, statistics="running"),))
        for n, v in enumerate((1.9, 2.8, 3.7))
    ]
    validation, test = paired([*plain, *other])
    assert (validation.metric, validation.difference) == ("validation bits per byte", 0.0)
    assert validation.low is None  # all differences are equal
    # Differences -0.1, -0.2, -0.3: mean -0.2, deviation 0.1, error 0.1 / sqrt(3); t(2) = 4.3027.
    half = 4.3026527 * 0.1 / math.sqrt(3)
    assert test.metric == "test bits per byte"
    assert test.difference == pytest.approx(-0.2)
    assert (test.low, test.high) == (pytest.approx(-0.2 - half), pytest.approx(-0.2 + half))
    assert (test.first_mean, test.first_spread) == (3.0, 1.0)


def test_test_scores_measured_in_other_ways_are_never_mixed() -> None:
    short, whole = scored(1.0, protocol="100 tokens"), scored(2.0, protocol="all tokens")
    runs = [
        run_facts({1: 9.0}, seed=0, tested=(short, whole)),
        run_facts({1: 9.0}, seed=1, tested=(whole,)),
        run_facts({1: 9.0}, seed=2, tested=(scored(5.0, step=8, protocol="all tokens"),)),
        run_facts({1: 9.0}, seed=0, router="adaptive", tested=(short,)),
    ]
    first, second = (one.to_json(runs)["test"] for one in conditions(runs))
    assert (first["n"], first["mean"], first["protocol"]) == (2, 2.0, "all tokens")
    assert (second["n"], second["std"]) == (1, None)
    (pair,) = (one for one in paired(runs) if one.metric.startswith("test"))
    assert (pair.seeds, pair.difference) == ((0,), 0.0)


def test_two_statistics_modes_are_not_compared() -> None:
    running, batch = (
        run_facts(
            {1: 9.0},
            router="adaptive",
            tested=(scored(1.0, statistics=mode),),
            **{"model.router.statistics": mode},
        )
        for mode in ("running", "batch")
    )
    assert [pair.metric for pair in paired([running, batch])] == ["validation bits per byte"]


def test_an_option_that_two_of_three_runs_have_differs_between_those_two() -> None:
    measure, clip = "model.router.measure", "clip"
    plain = run_facts({1: 1.0})
    first, second = (
        run_facts({1: 1.0}, router="adaptive", **{measure: one, clip: 1.0})
        for one in ("mad", "std")
    )
    rows = {row["key"]: row for row in settings_rows([plain, first, second])}
    assert (rows[measure]["differs"], rows[measure]["only"]) == (True, [1, 2])
    assert (rows[clip]["differs"], rows[clip]["only"]) == (False, [1, 2])
    assert (rows["lr"]["differs"], rows["lr"]["only"]) == (False, None)


def test_runs_on_other_texts_are_no_group(tmp_path: Path) -> None:
    """Two folders may hold the same text or not: the checkpoints tell. A new run has none yet."""
    runs = [
        replace(run_facts({1: 1.0}, **{"data.folder": folder}), folder=tmp_path / name)
        for name, folder in (("a", "x"), ("b", "y"), ("c", "z"), ("new", "z"))
    ]
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        step = tmp_path / name / "checkpoints" / "step-00000001"
        step.mkdir(parents=True)
        write_sealed(step / "state.json", {"step": 1, "corpus_sha256": text})
    assert groups(runs) == [0, 0, 1, 1]
    assert groups([runs[0], runs[3]]) == [0, 0]


def test_runs_on_other_images_are_no_group(tmp_path: Path) -> None:
    """The images of one folder may have changed between two runs."""
    runs = [
        replace(run_facts({1: 1.0}, **{"data.source": "x"}), folder=tmp_path / name)
        for name in ("a", "b", "c")
    ]
    for run, labels in zip(runs, ("1", "1", "2"), strict=True):
        step = run.folder / "checkpoints" / "step-00000001"
        step.mkdir(parents=True)
        write_sealed(step / "state.json", {"step": 1, "labels_sha256": labels})
    assert groups(runs) == [0, 0, 1]
