"""Reports on disk, on the terminal and on the page; the command."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from acmoe.cli.arguments.parse import Command, parse
from acmoe.cli.bench import Bench
from acmoe.cli.bench.terminal import terminal_tables
from acmoe.cli.bench.tools import Table
from acmoe.errors import UserError
from acmoe.lab.bench.harness import results
from acmoe.lab.bench.harness.results import Report, environment, newest, save
from acmoe.lab.bench.harness.table import BEGIN, END, absences, markdown, update_page
from acmoe.lab.bench.layers.layer import LayerConfig, bench_layer

COMMANDS: dict[str, type[Command]] = {"bench": Bench, "again": Bench}


def layer_row(**changes: object) -> dict[str, object]:
    """A row of a layer's report, figures chosen."""
    row: dict[str, object] = {
        "shape": "olmoe", "contestant": "acmoe", "part": "forward", "absent": None,
        "refused": None, "ms": 2.5, "ms_low": 2.25, "ms_high": 3.0, "tflops": 512.0,
        "of_ceiling": 0.8, "memory_mib": 2048.0, "forward_error": 0.004, "gradient_error": 0.005,
        "busiest_load": 0.2,
    }  # fmt: skip
    return row | changes


def report(*rows: dict[str, object], kind: str = "layer", date: str = "2026-01-02") -> Report:
    return Report(
        kind=kind,
        date=date,
        command=f"acmoe bench {kind} --save",
        environment={"device": "NVIDIA H200", "torch": "2.11", "triton": None, "commit": "abc"},
        arguments={"repeat": 2},
        rows=list(rows) or [layer_row()],
    )


def test_a_report_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    config = LayerConfig(shapes=("tiny",), rivals=("torch",), repeat=2, device="cpu")
    taken = bench_layer(config, command="acmoe x")
    path = save(taken, tmp_path / "results")
    back = Report.from_json(path.read_text())
    lists = {"shapes": ["tiny"], "tokens": [], "rivals": ["torch"]}  # JSON has no tuples
    assert back == replace(taken, arguments=taken.arguments | lists)
    assert set(json.loads(path.read_text())) == {
        *("kind", "date", "command", "environment", "arguments", "rows")
    }


def test_the_file_is_named_by_date_kind_and_device(tmp_path: Path) -> None:
    assert save(report(), tmp_path).name == "2026-01-02-layer-nvidia-h200.json"


def test_a_report_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    path = save(report(), tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=f"^cannot write {path}: Is a directory; "):
        save(report(), tmp_path)
    assert list(tmp_path.iterdir()) == [path]  # no draft is left
    with pytest.raises(UserError, match=f"^cannot write {Path('/dev/null/x')}/.*: Not a directory"):
        save(report(), Path("/dev/null/x"))


def test_the_environment_names_the_versions_that_ran() -> None:
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert set(found) >= {"device", "python", "acmoe", "torch", "triton", "commit"}


def test_a_report_of_a_cpu_says_how_many_threads_ran() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        found = environment(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    assert found["threads"] == str(threads + 1)
    of_cpu = replace(report(), environment=report().environment | {"threads": "3"})
    assert "2026-01-02, torch 2.11, triton None, threads 3, commit abc" in markdown(of_cpu)
    assert "2026-01-02, torch 2.11, triton None, commit abc" in markdown(report())


def test_the_environment_names_rivals_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"sonic-moe": "0.1", "torch": "2", "scattermoe": None}
    monkeypatch.setattr(results, "_version", lambda package: versions.get(package))
    found = environment(torch.device("cpu"))
    assert found["sonic-moe"] == "0.1"
    assert "scattermoe" not in found and found["triton"] is None


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "2026-01-01-layer-x.json").write_text('{"kind": "layer"}')
    with pytest.raises(UserError, match=r"2026-01-01-layer-x.json is no benchmark report"):
        newest(tmp_path)


def test_only_the_newest_of_each_kind_is_rendered(tmp_path: Path) -> None:
    for taken in (
        report(layer_row(ms=9.0)),
        report(layer_row(ms=4.0), date="2026-02-01"),
        report(layer_row(ms=7.0), kind="layer-skew"),
    ):
        save(taken, tmp_path)
    found = newest(tmp_path)
    assert [(one.kind, one.rows[0]["ms"]) for one in found] == [("layer", 4.0), ("layer-skew", 7.0)]


def test_the_page_changes_between_its_markers_and_nowhere_else(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(f"before\n{BEGIN}\nold figures\n{END}\nafter\n")
    assert update_page(page, results) == 0
    assert page.read_text() == f"before\n{BEGIN}\n\nNo figures yet.\n\n{END}\nafter\n"
    save(report(), results)
    assert update_page(page, results) == 1
    once = page.read_text()
    assert once.startswith("before\n") and once.endswith(f"{END}\nafter\n")
    assert "| olmoe | acmoe | forward | 2.500 (2.250-3.000) | 512 | 80% | 2,048 |" in once
    assert "acmoe bench layer --save" in once and "old figures" not in once
    update_page(page, results)
    assert page.read_text() == once


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{END} first, then {BEGIN}")
    with pytest.raises(UserError, match="must hold"):
        update_page(page, tmp_path)
    assert page.read_text() == f"{END} first, then {BEGIN}"


def test_refusals_stand_in_the_table_and_absences_below_it() -> None:
    nothing = {"ms": None, "ms_low": None, "ms_high": None, "tflops": None, "of_ceiling": None,
               "memory_mib": None, "forward_error": None, "gradient_error": None}  # fmt: skip
    taken = report(
        layer_row(contestant="liger", refused="WrongResultError: 1e-1 | all", **nothing),
        layer_row(contestant="scattermoe", absent="it is not installed", **nothing),
        layer_row(contestant="scattermoe", absent="it is not installed", shape="fine", **nothing),
    )
    line = "scattermoe took no part, it is not installed: olmoe, fine"
    assert absences(taken) == [line]
    text = markdown(taken)
    assert "refused: WrongResultError: 1e-1 \\| all" in text and text.endswith(f"- {line}")
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(*terminal_tables(taken, 200))
    shown = console.export_text()
    assert "WrongResultError" in shown and "scattermoe" not in shown


def test_the_command_prints_json_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "layer", "--shapes", "tiny", "--repeat", "2", "--device", "cpu"]
    assert parse(COMMANDS, [*words, "--json"]).run() == 0
    taken = Report.from_json(capsys.readouterr().out)
    assert taken.command == "acmoe " + " ".join(words)
    assert taken.rows[0]["contestant"] == "dense matmul"


def test_which_names_every_op_and_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(COMMANDS, ["bench", "--which"]).run() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("expert_mlp", "measure_scale", "sonicmoe", "fast path"))
    assert "experts of olmoe" in shown


def test_which_answers_for_the_layers_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--which", "layer", "--shapes", "swin", "64x32x32x4x2"]
    assert parse(COMMANDS, words).run() == 0
    shown = capsys.readouterr().out
    assert "experts of swin" in shown and "experts of 64x32x32x4x2" in shown


def test_the_table_command_counts_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}")
    save(report(), tmp_path / "results")
    words = ["bench", "table", "--page", str(page), "--results", str(tmp_path / "results")]
    assert parse(COMMANDS, words).run() == 0
    assert "1 table" in capsys.readouterr().out


def test_the_page_of_saved_reports_is_what_the_table_command_writes(tmp_path: Path) -> None:
    root, command = Path(__file__).parents[3], Table()
    page = tmp_path / "reports.md"
    page.write_text((root / command.page).read_text())
    assert update_page(page, root / command.results) > 0
    assert page.read_text() == (root / command.page).read_text()
