"""A command that ends in a file refuses a path that cannot be written before it does any work."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from acmoe.cli import main
from acmoe.cli.run.analyze import Analyze
from acmoe.cli.study import Study
from acmoe.errors import UserError
from acmoe.lab import theory
from acmoe.lab.bench.layers import layer
from acmoe.lab.study.evidence import page
from acmoe.lab.study.results import report as study_report
from acmoe.report import page as report_page

Call = Callable[..., tuple[int, str]]


def work(*_: object, **__: object) -> NoReturn:
    pytest.fail("the work began")


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Return a function that runs a command beside a file called `file`, and returns its error."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        printed = capsys.readouterr()
        assert printed.out == ""
        assert isinstance(stop.value.code, int)
        return stop.value.code, printed.err

    return run


REFUSED = "acmoe: cannot write {}: file is no folder; choose another path\n"


@pytest.mark.parametrize(
    ("arguments", "owner", "name", "what"),
    [
        (("analyze", "run", "--out", "file"), Analyze, "sample", "into file"),
        (("analyze", "run", "--out", "file/new"), Analyze, "sample", "into file/new"),
        (("theory", "--figures", "file/new"), theory, "run_checks", "into file/new"),
        (("report", "run", "--out", "file/page.html"), report_page, "find_runs", "file/page.html"),
        (("study", "synthetic", "--out", "file/one.jsonl"), Study, "_cells", "file/one.jsonl"),
        (
            ("study", "synthetic", "--summarise", "--page", "file/one.md"),
            study_report,
            "report",
            "file/one.md",
        ),
        (
            ("study", "synthetic", "--summarise", "--pictures", "file"),
            study_report,
            "report",
            "into file",
        ),
        (
            ("study", "--evidence", "one.md", "--pictures", "file"),
            page,
            "write_evidence",
            "into file",
        ),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_refused_before_the_work(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    owner: object,
    name: str,
    what: str,
) -> None:
    monkeypatch.setattr(owner, name, work)
    assert call(*arguments) == (2, REFUSED.format(what))


def test_a_missing_run_is_named_before_the_folder_of_its_analysis(call: Call) -> None:
    Path("file").rename("analysis")
    code, said = call("analyze")
    assert code == 2
    assert said.startswith("acmoe: no run given; ")


def test_a_study_adds_lines_to_its_file_where_it_may_create_none(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("locked")
    folder.mkdir()
    (folder / "one.jsonl").touch()
    # The superuser may write anywhere, so that the mode of a folder would not show it.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)

    def began(_: object) -> NoReturn:
        raise UserError("the work began")

    monkeypatch.setattr(Study, "_cells", began)
    assert call("study", "synthetic", "--out", "locked/one.jsonl")[1] == "acmoe: the work began\n"
    said = call("study", "synthetic", "--out", "locked/two.jsonl")[1]
    assert said.startswith("acmoe: cannot write locked/two.jsonl: no permission in locked; ")


def test_a_benchmark_that_cannot_be_saved_is_not_measured(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "bench_layer", work)
    Path("file").rename("benchmarks")
    code, said = call("bench", "layer", "--save")
    assert code == 2
    assert said == (
        "acmoe: cannot write into benchmarks/results: benchmarks is no folder; choose another "
        "path\n"
    )


def test_figures_of_the_theory_need_matplotlib_before_the_work(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theory, "run_checks", work)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, said = call("theory", "--figures", "new")
    assert (code, said.count("\n")) == (2, 1)
    assert "--figures new needs the plots extra: pip install 'acmoe[plots]'" in said


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("file/new", "cannot write into file: file is no folder"),
        (".", ". cannot be replaced by a new folder; give one with a name"),
        ("/", "/ cannot be replaced by a new folder; give one with a name"),
    ],
)
@pytest.mark.parametrize("to", ["hf", "run"])
def test_an_export_that_cannot_be_written_reads_no_run(
    call: Call, monkeypatch: pytest.MonkeyPatch, to: str, folder: str, says: str
) -> None:
    pytest.importorskip("transformers")
    from acmoe.hf.models import export, restore

    monkeypatch.setattr(export, "open_source", work)
    monkeypatch.setattr(restore, "read_sealed", work)
    code, said = call("export", "run", folder, "--to", to)
    assert (code, said.count("\n")) == (2, 1)
    assert says in said
