"""`acmoe study NAME --list`: the cells and how each ended, with data and without."""

import json
import shutil
from pathlib import Path

import pytest

from acmoe.lab.study.evidence.claims import CLAIMS
from acmoe.lab.study.registry import STUDIES, study_of
from command_call import call
from study_cases import data_folder

ROOT = Path(__file__).parents[2]


def test_the_cells_of_a_study_can_be_listed_without_running_them(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ("synthetic", "--list", "--seeds", "0", "1", "--only", "smoe")
    code, out, _ = call(capsys, "study", *arguments)
    assert code == 0
    *cells, total = out.splitlines()
    left = f"{len(cells)} cells: 0 done, 0 failed, {len(cells)} left"
    assert total == f"{left} (runs/study/synthetic.jsonl)"
    assert all("/ smoe / seed" in cell for cell in cells)
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_how_each_cell_ended_last(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    setting = ("--settings", "layers 1", "--only", "smoe", "--seeds", "0", "1", "2")
    _, out, _ = call(capsys, "study", "synthetic", "--list", *setting)
    first, second, _ = (line.split()[0] for line in out.splitlines()[:3])
    ends = [(first, "failed"), (second, "failed"), (first, "done")]  # the first was run again
    lines = [json.dumps({"digest": digest, "status": status}) for digest, status in ends]
    Path("some.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = call(capsys, "study", "synthetic", "--list", "--out", "some.jsonl", *setting)
    assert code == 0
    *cells, total = out.splitlines()
    assert [line.split()[1] for line in cells] == ["done", "failed", "left"]
    assert total == "3 cells: 1 done, 1 failed, 1 left (some.jsonl)"


def cells_of(out):
    """The lines of the cells as (digest, end, name), and the last line."""
    *lines, total = out.splitlines()
    return [line.split(maxsplit=2) for line in lines], total


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_listed_where_no_data_are_and_nothing_is_written(
    capsys, monkeypatch, tmp_path, name
):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "study", name, "--list")
    assert (code, err) == (0, "")
    cells, total = cells_of(out)
    assert total.startswith(f"{len(cells)} cells: 0 done, 0 failed, {len(cells)} left")
    assert total.endswith("; data not compared)") is (name != "synthetic")  # its data are drawn
    assert {digest == "-" for digest, *_ in cells} == {name != "synthetic"}
    assert list(tmp_path.iterdir()) == []


# The commands of the studies' pages. Every record of the three files is that of a cell: nano.jsonl
# has 50, vision.jsonl 45, and of glam-small with smoe long-words.jsonl has 4.
@pytest.mark.parametrize(
    ("arguments", "total"),
    [
        (("nano",), "50 cells: 50 done, 0 failed, 0 left"),
        (("vision", "graph=true"), "55 cells: 45 done, 0 failed, 10 left"),
        (("long-words", "--settings", "glam-small", "--only", "smoe"), "4 cells: 4 done, 0 failed"),
    ],
)
def test_without_data_a_record_of_any_data_is_that_of_its_cell(
    capsys, monkeypatch, arguments, total
):
    monkeypatch.chdir(ROOT)
    code, out, _ = call(capsys, "study", *arguments, "--list", "--published")
    cells, last = cells_of(out)
    assert code == 0 and last.startswith(total)
    lines = (ROOT / f"studies/records/{arguments[0]}.jsonl").read_text().splitlines()
    names = {record["digest"]: record for record in map(json.loads, lines)}
    for digest, end, name in cells:
        assert (digest == "-") is (end == "left")
        if end == "done":
            record = names[digest]
            title = f"{record['setting']} / {record['condition']} / seed {record['seed']}"
            assert name == f"{title}  ({record['size']})"


def test_another_option_or_seed_is_another_cell(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for changed in (("lr=0.5",), ("--steps", "7"), ("--seeds", "99"), ("--tokens", "64")):
        where = ("--list", "--published", "--settings", "switch-nano")
        _, out, _ = call(capsys, "study", "nano", *changed, *where)
        assert ": 0 done, 0 failed" in cells_of(out)[1], changed


def test_with_data_only_records_of_the_same_data_count(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data_folder(tmp_path / "data")
    command = ("bytes", "--list", "--seeds", "0", "--megabytes", "0.01", "--only", "smoe")
    given = ("--data", "data", "--settings", "pre-norm, balance 0.01")
    code, out, _ = call(capsys, "study", *command, *given)
    ((digest, end, _),), total = cells_of(out)
    assert (code, end) == (0, "left")
    assert total == "1 cell: 0 done, 0 failed, 1 left (runs/study/bytes.jsonl)"
    assert len(digest) == 16
    # A record of the same cell, whose data were others.
    shutil.rmtree("runs")
    records = (ROOT / "studies/records/bytes.jsonl").read_text().splitlines()
    kept = [one for one in map(json.loads, records) if one["condition"] == "smoe"]
    Path("other.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    options = (
        *("model.block=512", "model.span=512", "graph=true", "eval_tokens=65536"),
        *("eval_every=100", "--steps", "500", "--batch", "16", "--tokens", "200000"),
    )
    settings = ("--settings", "pre-norm, balance 0.01", "--out", "other.jsonl")
    where = ("bytes", *options, "--list", "--seeds", "0", "--only", "smoe", *settings)
    _, out, _ = call(capsys, "study", *where, "--megabytes", "40")
    assert cells_of(out)[1] == ("1 cell: 1 done, 0 failed, 0 left (other.jsonl; data not compared)")
    _, out, _ = call(capsys, "study", *where, "--megabytes", "0.01", "--data", "data")
    assert cells_of(out)[1] == "1 cell: 0 done, 0 failed, 1 left (other.jsonl)"


def test_the_commands_of_the_evidence_page_name_data_that_are_read():
    assert all(study_of(claim.study).reads(claim.settings) for claim in CLAIMS)
