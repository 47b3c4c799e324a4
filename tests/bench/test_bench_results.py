"""Reports on disk, on the terminal and on the page; the tuner's bookkeeping; the command."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from acmoe.bench import results
from acmoe.bench.layer import LayerConfig, bench_layer
from acmoe.bench.results import Report, environment, newest, save
from acmoe.bench.shapes import SHAPES
from acmoe.bench.table import BEGIN, END, absences, markdown, terminal_table, update_page
from acmoe.bench.tune import (
    KERNELS,
    TuneConfig,
    bench_tune,
    candidates,
    compile_jobs,
    write_winners,
)
from acmoe.cli.bench import Bench
from acmoe.cli.parse import Command, parse
from acmoe.errors import UserError
from acmoe.kernels.tuning import Blocks

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
    taken = bench_layer(LayerConfig(shapes=("tiny",), repeat=2, device="cpu"), command="acmoe x")
    path = save(taken, tmp_path / "results")
    back = Report.from_json(path.read_text())
    assert back == replace(taken, arguments={**taken.arguments, "shapes": ["tiny"], "rivals": []})
    assert set(json.loads(path.read_text())) == {
        *("kind", "date", "command", "environment", "arguments", "rows")
    }


def test_the_file_is_named_by_date_kind_and_device(tmp_path: Path) -> None:
    assert save(report(), tmp_path).name == "2026-01-02-layer-nvidia-h200.json"


def test_the_environment_names_the_versions_that_ran() -> None:
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert set(found) >= {"device", "python", "acmoe", "torch", "triton", "commit"}


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
    console.print(terminal_table(taken))
    shown = console.export_text()
    assert "WrongResultError" in shown and "scattermoe" not in shown


def test_candidates_are_compiled_once_for_all_shapes_that_share_them() -> None:
    # olmoe and qwen30b: swiglu, every block of features divides 2048, 1024, 768 and their doubles,
    # and no tile is wider than 768; so the second shape adds nothing.
    one = compile_jobs([SHAPES["olmoe"]], ("down",))
    both = compile_jobs([SHAPES["olmoe"], SHAPES["qwen30b"]], ("down",))
    assert both == one and len(one) == len(candidates("down", SHAPES["olmoe"]))
    # gelu is another kernel
    assert len(compile_jobs([SHAPES["olmoe"], SHAPES["swin"]], ("down",))) == 2 * len(one)
    # Parts of a weight gradient are other kernels than the whole, but two parts than four are not.
    weights = compile_jobs([SHAPES["switch"]], ("up_weight",))
    tiles = {blocks._replace(splits=0) for blocks in candidates("up_weight", SHAPES["switch"])}
    assert len(weights) == 2 * len(tiles)


def test_only_small_weights_are_summed_in_parts() -> None:
    # mixtral: 8 * 4096 * 28672 / (128 * 256) = 28,672 tiles; switch, of 128 by 128: 121.
    assert {blocks.splits for blocks in candidates("up_weight", SHAPES["mixtral"])} == {1}
    square = [b for b in candidates("up_weight", SHAPES["switch"]) if b[:5] == (128, 128, 64, 8, 3)]
    assert {blocks.splits for blocks in square} == {1, 2, 3, 4, 6}
    assert {blocks.splits for blocks in candidates("down", SHAPES["switch"])} == {0}


def test_two_accumulators_leave_no_room_for_the_widest_tile() -> None:
    gated = candidates("up", SHAPES["olmoe"])
    assert all(blocks.n < 256 for blocks in gated)
    assert len(gated) < len(candidates("up", SHAPES["switch"]))
    assert {blocks.tma for blocks in gated} == {False, True}


def test_programs_that_stay_read_by_the_copy_engine_and_share_a_multiprocessor() -> None:
    """At most 255 registers for each of 256 threads, of the 65,536 there are."""
    stay = [blocks for blocks in candidates("down", SHAPES["olmoe"]) if blocks.persistent]
    assert {blocks.num_warps * blocks.persistent for blocks in stay} == {8}
    assert all(blocks.tma for blocks in stay)


def test_winners_join_the_table_that_is_there(tmp_path: Path) -> None:
    table = tmp_path / "tuned.json"
    write_winners({"up/8/8/2": Blocks(1, 2, 3, 4, 5), "down/8/8/2": Blocks(1, 1, 1, 1, 1)}, table)
    write_winners({"up/8/8/2": Blocks(16, 16, 16, 4, 2, True)}, table)
    assert json.loads(table.read_text()) == {
        "down/8/8/2": [1, 1, 1, 1, 1, False, 0, 0],
        "up/8/8/2": [16, 16, 16, 4, 2, True, 0, 0],
    }


def test_tuning_needs_a_gpu_and_known_kernels() -> None:
    with pytest.raises(UserError, match="device=cpu"):
        bench_tune(TuneConfig(device="cpu"))
    with pytest.raises(UserError, match=f"kernel 'side' is unknown; choose among {KERNELS[0]}"):
        TuneConfig(kernels=("side",))


def test_the_command_prints_json_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "layer", "--shapes", "tiny", "--repeat", "2", "--device", "cpu"]
    assert parse(COMMANDS, [*words, "--json"]).run() == 0
    taken = Report.from_json(capsys.readouterr().out)
    assert taken.command == "acmoe " + " ".join(words)
    assert taken.rows[0]["contestant"] == "dense matmul"


def test_which_names_every_op_and_rival(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(COMMANDS, ["bench", "--which"]).run() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("experts", "statistics", "sonicmoe", "grouped_mm"))
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
