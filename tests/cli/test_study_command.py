"""`acmoe study` from data to page, on a CPU."""

import json
import sys
from pathlib import Path

import pytest
from started import METHOD, fork_server

from acmoe.lab.study import pool
from acmoe.lab.study.cell_queue import Tally
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.page import markers
from command_call import call
from slow_cases import mostly_slow
from study_cases import SMALL, data_folder

ROOT = Path(__file__).parents[2]

MODEL = (
    *("model.dim=16", "model.hidden=16", "model.heads=2", "model.repeats=3"),
    *("model.span=24", "model.block=16", "model.num_experts=4"),
)


@mostly_slow("method", [METHOD, "spawn"])
def test_a_study_of_two_cells_runs_resumes_and_is_summarised(method, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACMOE_COMMIT", "0123abc")
    if method != "spawn":  # the command's own method, by which a process imports all for itself
        monkeypatch.setattr(pool, "_SPAWN", fork_server())
    data_folder(tmp_path / "data")
    sizes = ("--steps", "4", "--batch", "2", "--tokens", "200", "--megabytes", "0.01")
    where = ("--data", "data", "--device", "cpu", "--seeds", "0")
    which = ("--only", "smoe", "adaptive-previous", "--settings", "pre-norm, balance 0.01")
    command = ("bytes", *MODEL, *SMALL, *sizes, *where, *which)

    code, out, err = call(capsys, "study", *command)
    assert code == 0, err
    assert "0 cells had a record, 2 done, 0 failed, 0 not started" in out
    lines = [json.loads(line) for line in Path("runs/study/bytes.jsonl").read_text().splitlines()]
    assert [line["condition"] for line in lines] == ["smoe", "adaptive-previous"]
    for line in lines:
        assert line["environment"]["commit"] == "0123abc"
        assert line["config"]["model"]["dim"] == 16
        assert 1 < line["metrics"]["test"] < 9  # bits; a uniform guess among 256 is 8
        assert line["metrics"]["enwik8"] > 1
        assert str(tmp_path) not in json.dumps(line)

    code, out, _ = call(capsys, "study", *command)
    assert code == 0
    assert "2 cells had a record, 0 done" in out

    Path("other.md").write_text("mine\n")
    other = ("--page", "other.md", "--pictures", "none")
    assert call(capsys, "study", "bytes", "--summarise", *other)[0] == 2
    assert not Path("none").exists()
    code, out, _ = call(
        capsys, "study", "bytes", "--summarise", "--page", "page.md", "--pictures", "out"
    )
    assert code == 0
    page = Path("page.md").read_text()
    assert page.startswith("# The study `bytes`\n")  # a page that was not there is begun
    assert "commit 0123abc" in page
    assert "| test bits per byte | adaptive-previous | smoe | 1 |" in page
    assert Path("out/bytes-differences.svg").is_file()


CELL = ("synthetic", "--only", "smoe", "--settings", "layers 1, contrast 32.0")


def test_in_a_clone_a_trial_leaves_the_published_files_alone_unless_asked(
    capsys, monkeypatch, tmp_path
):
    ran = []

    def run_cells(cells, results, **_):
        ran.append(len(cells))
        for cell in cells:
            metrics = {metric.key: 0.5 for metric in STUDIES["synthetic"].compared}
            end = {"digest": cell.digest, "status": "done", "metrics": metrics, "curves": {}}
            results.add({**cell.to_json(), **end, "environment": {}, "options": ""})
        return Tally(done=len(cells), failed=0, left=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("acmoe.lab.study.pool.run_cells", run_cells)
    Path("studies/records").mkdir(parents=True)
    command = (*CELL, "--device", "cpu", "--seeds")
    assert (
        "(studies/records/synthetic.jsonl)"
        in call(capsys, "study", *command, "0", "1", "--published")[1]
    )
    assert call(capsys, "study", "synthetic", "--summarise", "--published")[0] == 0
    published = {path: path.read_bytes() for path in Path("studies").rglob("*.*")}
    assert {Path("studies/records/synthetic.jsonl"), Path("studies/synthetic.md")} <= set(published)
    # Cells that are published are no cells of the user: they run, and are continued there.
    for _ in range(2):
        assert "(runs/study/synthetic.jsonl)" in call(capsys, "study", *command, "0")[1]
    assert ran == [2, 1, 0]
    listed = call(capsys, "study", *CELL, "--list", "--seeds", "0", "1")[1].splitlines()[-1]
    assert listed == "2 cells: 1 done, 0 failed, 1 left (runs/study/synthetic.jsonl)"
    code, out, _ = call(capsys, "study", "synthetic", "--summarise")
    assert code == 0 and out.splitlines()[0] == "runs/study/synthetic.md"
    assert "--seeds 0`" in Path("runs/study/synthetic.md").read_text()
    assert published == {path: path.read_bytes() for path in Path("studies").rglob("*.*")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no study given"),
        (("nano", "--published"), "--published, but there is no folder studies/records here; run"),
        (("nano", "--published", "--out", "x"), "--out x and --published both name the results"),
        (("--evidence", "page.md", "--published"), "--published has no effect with --evidence"),
        (("synthetic", "--megabytes", "3", "--brief"), "reads no --megabytes 3 --brief"),
        (
            ("synthetic", "--vocabulary", "9", "--list"),
            "study synthetic reads no --vocabulary 9; leave it out",
        ),
        # Options that other settings of the study read.
        (
            ("nano", "--settings", "switch-nano", "--images", "5"),
            "study nano reads no --images 5 with --settings switch-nano; leave it out",
        ),
        (("nano", "--settings", "swin", "--tokens", "9", "--list"), "reads no --tokens 9 with"),
        (("byte",), "did you mean bytes?"),
        (("bytes",), "give their folder with --data (docs/howto/study-data.md says what it holds)"),
        (("ablations", "--settings", "enwik8"), '--settings "switch-nano, standard library" reads'),
        (
            ("bytes", "--data", "nowhere"),
            "nowhere/enwiki15-bytes is missing; --data needs this folder, with one file of text "
            "(docs/howto/study-data.md says how to get them)",
        ),
        (("bytes", "--summarise"), "bytes.jsonl is missing"),
        (("synthetic", "--steps", "0"), "--steps 0; it must be positive"),
        (("synthetic", "seed=3"), "use --seeds or --device"),
        (("synthetic", "--only", "nosuch"), "no such condition"),
        (("synthetic", "--settings", "nosuch"), "no setting has that in its name"),
        (("synthetic", "--jobs", "0"), "--jobs 0"),
        # Options are checked before data is read.
        (("bytes", "--data", "nowhere", "--jobs", "0"), "--jobs 0; it must be at least 1"),
        (("bytes", "--data", "nowhere", "--minutes", "0"), "--minutes 0.0; it must be positive"),
        (("synthetic", "--address", "auto"), "give --engine ray too"),
        (("synthetic", "--minutes", "-1"), "--minutes -1.0; it must be positive"),
        (("synthetic", "--minutes", "nan"), "--minutes nan; it must be positive"),
        (("bytes", "--summarise", "--seeds", "0", "1"), "--seeds 0 1 has no effect with --summ"),
        (("bytes", "--summarise", "--list"), "--list has no effect with --summarise; leave it out"),
        (("--evidence", "page.md", "--out", "x.jsonl"), "--out x.jsonl has no effect with --evid"),
        (("synthetic", "--page", "page.md"), "--page page.md has no effect without --summarise"),
        (("--list", "--steps", "3"), "--steps 3 has no effect on the list of studies"),
        (("bytes", "steps=3", "--summarise"), "acmoe: steps=3 has no effect with --summarise;"),
        # A data folder that nobody would read.
        (("synthetic", "--data", "x"), "--data x is not read: the study 'synthetic' needs no data"),
        (("long", "--settings", "nano", "--data", "x"), "x is not read: --settings nano needs no"),
        # Options of a run beside --list.
        (("bytes", "--list", "--jobs", "3"), "--jobs 3 has no effect with --list; leave it out"),
        (("nano", "--list", "--retry"), "--retry has no effect with --list; leave it out"),
        (("nano", "--list", "--device", "cpu"), "--device cpu has no effect with --list; leave"),
        (("nano", "--list", "--scratch", "x"), "--scratch x has no effect with --list; leave it"),
        (
            ("words", "--list", "--work", "x"),
            "--work x has no effect with --list, unless --data",
        ),
        (("synthetic", "--seeds", "1", "1"), "--seeds 1 1 names a seed twice; leave one out"),
        # A mistyped setting is not taken for one that reads data, nor KEY=VALUE for a setting.
        (("long", "--settings", "nanoo"), "--settings nanoo: no setting has that in its name"),
        (("long", "--settings", "nano", "steps=3"), "--settings steps=3: KEY=VALUE comes before"),
        (("nano", "--only", "smoe", "steps=3"), "--only steps=3: KEY=VALUE comes before"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "study", *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--only", "nosuch"), "--only nosuch: the study has no such condition"),
        (("--settings", "nosuch"), "--settings nosuch: no setting has that in its name"),
        (("--parts", "3"), "study nano reads no --parts 3; leave it out"),
        (("lrr=3",), "setting lrr is unknown; did you mean lr?"),
        (("--seeds", "-1"), "seed=-1"),
        (("--device", "nosuch"), "device='nosuch' is unknown"),
        (("--scratch", "file/below"), "cannot write into file/below: file is no folder"),
        (("--work", "file"), "file is no folder; choose another path"),
    ],
)
def test_options_are_checked_before_data_are_prepared(
    capsys, monkeypatch, tmp_path, arguments, says
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(
        "acmoe.lab.study.materials.prepare", lambda *_, **__: pytest.fail("data were prepared")
    )
    code, out, err = call(capsys, "study", "nano", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("missing", ["enwiki15-bytes", "enwik8-prefix"])
def test_every_missing_data_set_is_named_before_the_first_is_prepared(
    capsys, monkeypatch, tmp_path, missing
):
    monkeypatch.chdir(tmp_path)
    data_folder(tmp_path / "data")
    (tmp_path / "data" / missing).rename(tmp_path / "elsewhere")
    code, _, err = call(capsys, "study", "bytes", "--data", "data")
    assert code == 2 and f"{missing} is missing" in err
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_study_says_what_is_done_and_how_to_continue(capsys, monkeypatch, tmp_path):
    def interrupted(cells, results, **_):
        results.add({**cells[0].to_json(), "digest": cells[0].digest, "status": "done"})
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("acmoe.lab.study.pool.run_cells", interrupted)
    command = (*CELL, "--seeds", "0", "1", "--out", "r.jsonl", "--device", "cpu")
    code, _, err = call(capsys, "study", *command)
    assert code == 130
    assert err.splitlines()[-1] == (
        "acmoe: interrupted; 1 of 2 cells are done, in r.jsonl; give the same command again to "
        "continue"
    )


def test_every_study_is_listed_and_has_a_page(capsys):
    code, out, _ = call(capsys, "study", "--list")
    assert code == 0
    index = (ROOT / "studies" / "results.md").read_text()
    for name in STUDIES:
        assert name in out
        assert f"({name}.md)" in index
        page = (ROOT / "studies" / f"{name}.md").read_text()
        for marker in markers(name):
            assert page.count(marker) == 1


def test_a_missing_ray_is_named_before_any_data_is_prepared(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # the import raises
    code, _, err = call(capsys, "study", "synthetic", "--engine", "ray")
    assert code == 2
    assert "pip install 'acmoe[ray]'" in err
    assert list(tmp_path.iterdir()) == []
