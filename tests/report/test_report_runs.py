"""Reading a run's folder, whole or broken."""

import json
import shutil
from pathlib import Path

import pytest

from acmoe.errors import UserError
from acmoe.report.runs import find_runs, read_run, read_runs
from acmoe.storage.sealed import write_sealed
from acmoe.train.run_folder import LOCK, claim
from run_facts import run_facts
from tiny_runs import tiny_run


@pytest.fixture
def run(two_runs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(two_runs[1], tmp_path / "run"))


def test_a_finished_run_has_its_curves_its_router_and_its_best_step(run: Path) -> None:
    facts = read_run(run, "run")
    assert (facts.router, facts.seed, facts.state) == ("adaptive", 0, "finished")
    assert (facts.step, facts.steps, facts.notes) == (20, 20, ())
    assert [record["step"] for record in facts.valid] == [10, 20]
    assert facts.metric.key == "bits_per_byte"
    best = facts.best()
    assert best is not None
    assert best[1] == min(record["bits_per_byte"] for record in facts.valid)


def test_a_line_cut_off_by_a_crash_is_left_out_and_said(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    facts = read_run(run, "run")
    assert len(facts.train) + len(facts.valid) == 3
    assert facts.notes == (
        "metrics.jsonl: records left out: the last one incomplete",
        f"metrics.jsonl: {len(lines) - 3} of the {len(lines)} records up to step 20 are missing",
    )
    assert facts.state == "stopped"


def test_a_damaged_line_in_the_middle_is_named(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{oops", *lines[1:]]) + "\n")
    facts = read_run(run, "run")
    assert len(facts.train) + len(facts.valid) == len(lines)  # the damaged one costs only itself
    assert facts.notes == ("metrics.jsonl: records left out: 1 damaged (line 2)",)


def test_lines_that_are_no_records_are_counted(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text('[1]\n{"kind": "train"}\n' + path.read_text())
    assert read_run(run, "run").notes == (
        "metrics.jsonl: records left out: 1 damaged (line 1)",
        "metrics.jsonl: 1 lines are no records; left out",
    )


def test_a_run_without_figures_has_not_started(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    facts = read_run(run, "run")
    assert facts.state == "not started"
    assert facts.best() is None
    assert "nothing has been measured" in facts.notes[0]


def test_a_run_whose_folder_is_held_is_training(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claim(folder, tiny_run(corpus)):
        assert read_run(folder, "run").state == "training"
    assert read_run(folder, "run").state == "not started"


def test_a_dead_process_in_the_lock_file_trains_nothing(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    for content in ("", "999999999\n", "no number"):
        (run / LOCK).write_text(content)
        assert not read_run(run, "run").in_use


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no run"),
        ("{", "is damaged"),
        ("[]", "is no JSON object"),
        ('{"format": 1}', "lacks 'config'"),
        ('{"family": "language", "weights": "w.safetensors"}', "give the folder of the run"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, content: str, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=says) as refused:
        read_run(tmp_path, "run")
    assert "\n" not in str(refused.value)


def test_a_folder_of_runs_stands_for_them_plain_routers_first(
    two_runs: tuple[Path, Path],
) -> None:
    plain, adaptive = two_runs
    assert find_runs([plain.parent]) == [plain, adaptive]
    assert find_runs([adaptive, plain.parent]) == [adaptive, plain]  # and nothing twice


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="no folder in it is one"):
        find_runs([tmp_path])


def test_runs_of_the_same_name_are_told_apart_by_their_folders(
    two_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    copies = [shutil.copytree(two_runs[0], tmp_path / part / "run") for part in ("a", "b")]
    assert [run.name for run in read_runs(copies)] == ["a/run", "b/run"]


def test_the_best_value_is_the_lowest_or_the_highest_as_the_metric_wants() -> None:
    values = {10: 3.0, 20: 2.0, 30: 2.0}
    assert run_facts(values).best() == (20, 2.0)  # of equals the earlier, as training keeps it
    assert run_facts(values, key="top1").best() == (10, 3.0)


def test_a_value_that_is_no_number_is_not_the_best() -> None:
    assert run_facts({10: float("nan"), 20: 2.0}).best() == (20, 2.0)


def test_unknown_lengths_are_not_taken_for_finished(run: Path) -> None:
    document = json.loads((run / "config.json").read_text())
    document["config"]["steps"] = None
    del document["seal"]
    write_sealed(run / "config.json", document)
    assert read_run(run, "run").state == "stopped"
