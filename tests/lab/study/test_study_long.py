"""Long runs: a killed cell continues, and what counts as diverged."""

import math
import multiprocessing
import os
import signal
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from acmoe.data.text.corpus import load_corpus
from acmoe.errors import NonFiniteError
from acmoe.evaluate.run import METRICS, read_metrics
from acmoe.lab.study.cells.long import divergence
from acmoe.lab.study.cells.outcome import Outcome
from acmoe.lab.study.cells.separation import SEPARATION
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.pace import known_paces
from acmoe.lab.study.pool import run_cells
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.records import open_results
from acmoe.lab.study.size import Size
from acmoe.lab.study.study import choose
from acmoe.lab.study.worker import check_metrics, run_cell
from cpu import settle_cpu
from study_cases import record, tiny_cells, tiny_text

CHANGES = ("instability", "chance", "adjusted_rand")
CLOCK = ("step_ms", "train_seconds", "seconds")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny_text(tmp_path_factory.mktemp("study"))


def silent(line):
    pass


def long_cell(text, condition="adaptive-previous", **changes):
    """A cell of 4 updates that validates after each and saves after every second."""
    (cell,) = tiny_cells(text, condition, steps=4)
    config = replace(cell.config, checkpoint_every=2, **changes)
    other = text.folder.parent / "enwik8.npy"
    np.save(other, load_corpus(text.folder)["valid"][:200])
    tests = replace(
        cell.tests,
        rates=(0.025,),
        others=(("enwik8", str(other)),),
        divergence=0.3,
        routing_tokens=128,
    )
    return replace(cell, config=config, tests=tests)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The record of a cell that was never interrupted."""
    return run_cell(long_cell(text), tmp_path_factory.mktemp("whole"), silent)


def timeless(found):
    """A record without the figures that a clock gives."""
    assert all(found["metrics"][name] > 0 for name in CLOCK)
    kept = {name: value for name, value in found["metrics"].items() if name not in CLOCK}
    return {**found, "metrics": kept}


def test_a_killed_cell_continues_and_gives_the_same_figures(text, tmp_path, whole):
    cell, heard = long_cell(text), []

    def kill(line):
        if line.startswith("step 3 of 4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, tmp_path, kill)
    assert (tmp_path / f"acmoe-study-{cell.digest}").is_dir()
    again = run_cell(cell, tmp_path, heard.append)
    assert heard[0] == "continues after step 2"
    assert list(tmp_path.iterdir()) == []  # a finished cell leaves nothing
    assert timeless(again) == timeless(whole)
    assert whole["metrics"]["tokens_trained"] == 4 * cell.config.tokens_per_step
    assert {"contaminated", "contaminated 0.025"} <= whole["metrics"].keys()


@pytest.mark.slow
def test_a_cell_whose_process_is_killed_continues(text, tmp_path, whole):
    cell = long_cell(text)
    folder = tmp_path / f"acmoe-study-{cell.digest}"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_cell_and_die, args=(cell, tmp_path), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(folder / METRICS) if "layers" in line] == [
        1,
        2,
        3,
    ]
    again = run_cell(cell, tmp_path, silent)
    assert timeless(again) == timeless(whole)


def run_cell_and_die(cell, scratch):
    """Kill this process as `kill -9` does, after the third validation was written."""
    settle_cpu()  # as in this process: the same number of threads
    run_cell(cell, scratch, lambda line: line.startswith("step 3 of 4") and os.kill(os.getpid(), 9))


def test_the_routing_of_every_layer_is_recorded_at_every_validation(whole):
    for name in ("valid", "load_balance", "instability", "scale_rms_log", *SEPARATION):
        assert [step for step, _ in whole["curves"][name]] == [1, 2, 3, 4]
    by_layer = whole["details"]["routing_by_layer"]
    assert by_layer["steps"] == [1, 2, 3, 4]
    names = {"load_balance", *CHANGES, *SEPARATION}
    assert by_layer.keys() == {"steps", *names}
    assert all(len(layers) == 3 for name in names for layers in by_layer[name])
    for name in ("load_balance", "within_share_scaled"):
        means = [fmean(v for v in layers if v is not None) for layers in by_layer[name]]
        assert means == [value for _, value in whole["curves"][name]]
    shares = [value for _, value in whole["curves"]["within_share"]]
    assert len(set(shares)) == 4  # every validation measures the weights of its step
    assert whole["metrics"]["within_share"] == shares[-1]


@pytest.mark.slow  # tests/evaluate/test_language_evaluation.py has it for one evaluation
def test_measuring_the_routing_changes_no_loss(text, tmp_path, whole):
    cell = long_cell(text)
    plain = run_cell(
        replace(cell, tests=replace(cell.tests, routing_tokens=None)), tmp_path, silent
    )
    assert "routing_by_layer" not in plain["details"]
    for name in ("train_loss", "valid"):
        assert whole["curves"][name] == plain["curves"][name]
    figures = timeless(plain)["metrics"]
    assert {"test", "contaminated", "scale_rms_log"} <= figures.keys()
    assert {name: whole["metrics"][name] for name in figures} == figures


def test_a_further_text_is_scored_clean_and_at_each_rate(whole):
    keys = ("enwik8", "enwik8 contaminated 0.025", "enwik8 contaminated")
    assert len({whole["metrics"][key] for key in keys}) == 3
    # Other statistics than the model's own: the clean text alone.
    assert "enwik8_running" in whole["metrics"]
    assert "enwik8 contaminated_running" not in whole["metrics"]


def test_a_loss_that_is_not_finite_is_a_result(text, tmp_path):
    found = run_cell(long_cell(text, "smoe", lr=1e30, warmup=0, log_every=1), tmp_path, silent)
    assert (found["status"], found["metrics"]["diverged"]) == ("done", 1.0)
    assert "test" not in found["metrics"]
    assert "not finite" in found["details"]["stopped"]


def test_a_score_that_is_not_finite_is_divergence_where_the_study_declares_it(
    text, tmp_path, monkeypatch
):
    def broken(*arguments, **options):
        raise NonFiniteError("the loss of batch 1 of 3 is not finite; try again")

    monkeypatch.setattr("acmoe.lab.study.cells.text.score_stream", broken)  # after training
    cell = long_cell(text, "smoe")
    found = run_cell(cell, tmp_path, silent)
    assert (found["status"], found["metrics"]["diverged"]) == ("done", 1.0)
    assert "test" not in found["metrics"]
    assert found["details"]["stopped"].startswith("test, statistics none: the loss of batch 1")
    undeclared = replace(cell, tests=replace(cell.tests, divergence=None))
    with pytest.raises(NonFiniteError, match="test, statistics none"):
        run_cell(undeclared, tmp_path, silent)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_outcome_with_a_metric_that_is_not_finite_is_refused(value):
    with pytest.raises(NonFiniteError, match=f"the cell's test={value} is not finite"):
        check_metrics(Outcome(metrics={"valid": 1.0, "test": value}))
    check_metrics(Outcome(metrics={"valid": 1.0}))


def test_a_run_has_diverged_where_its_last_loss_is_far_above_its_best():
    steady = divergence([(1, 2.0), (2, 1.0), (3, 1.2)], 0.3)
    assert steady["diverged"] == 0
    assert math.isclose(steady["rise"], 0.2)
    recovered = divergence([(1, 2.0), (2, 3.5), (3, 1.0)], 0.3)
    assert recovered == {"diverged": 0.0, "rise": 1.5}
    assert divergence([(1, 1.26), (2, 3.52)], 0.3)["diverged"] == 1


def test_no_cell_begins_that_cannot_end_at_the_pace_of_its_setting(text, tmp_path):
    (cell,) = tiny_cells(text, "smoe")  # 4 updates
    here = {"environment": {"device": "a card", "jobs": 1}}

    def done(seconds, **changes):
        known = {"config": {"steps": 2}, "metrics": {"seconds": seconds}, "setting": cell.setting}
        return record("smoe", 0, 1.0, **{**known, **here, **changes})

    assert known_paces([done(50), done(60), done(70, setting="other")], here) == {
        "tiny": 30,
        "other": 35,
    }
    assert known_paces([done(60, environment={"device": "another", "jobs": 1})], here) == {}
    with open_results(tmp_path / "results.jsonl") as results:
        results.add(done(60))  # 30 s an update: the cell would take 2 minutes
        tally = run_cells([cell], results, minutes=1.9, origin=here)
    assert (tally.done, tally.left) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["distance", "fade"])
def test_conditions_of_our_own_are_rehearsed_at_nano_size(condition, tmp_path):
    size = Size(steps=4, batch=2, tokens=512, megabytes=0.2, device="cpu")
    materials = Materials(data=tmp_path / "data", work=tmp_path / "work")
    cells = STUDIES["long"].cells(materials, size, (0,), ("nano",))
    (cell,) = choose(cells, (condition,), ("nano",))
    found = run_cell(cell, tmp_path, silent)
    assert (found["status"], found["metrics"]["diverged"]) == ("done", 0.0)
    assert {"test", "contaminated 0.025"} <= found["metrics"].keys()
    assert (found["metrics"]["scale_rms_log"] == 0) == (condition == "fade")
