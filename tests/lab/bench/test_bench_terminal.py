"""Tables of `acmoe bench` on narrow terminals: every figure is there, and no word is broken."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from acmoe.cli.bench.terminal import terminal_tables
from acmoe.lab.bench.harness.results import Report
from acmoe.lab.bench.harness.table import cells, columns_of

RESULTS = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("*.json"))


def shown(report: Report, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    for table in terminal_tables(report, width):
        console.print(table)
    return console.export_text().splitlines()


def words(report: Report) -> set[str]:
    headings = [column.heading for column in columns_of(report)]
    return {word for row in [headings, *cells(report)] for cell in row for word in cell.split()}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_word_of_a_recorded_report_is_broken_at_80_columns(path: Path) -> None:
    report = Report.from_json(path.read_text())
    lines = shown(report, 80)
    assert max(map(len, lines)) <= 80
    separators = str.maketrans(dict.fromkeys("\u2502\u2503", " "))
    found = {word for line in lines for word in line.translate(separators).split()}
    assert words(report) <= found


def a_report(shape: str) -> Report:
    row = {
        **{"shape": shape, "contestant": "transformers-eager", "part": "forward+backward"},
        **{"ms": 26.588, "ms_low": 26.124, "ms_high": 27.052, "refused": None, "absent": None},
        **{"tflops": 0.000532, "of_ceiling": 0.01, "memory_mib": 12345.0},
        **{"forward_error": 2.6e-07, "gradient_error": 1e-8},
    }
    where = {"device": "x86_64", "torch": "2.13.0+cpu", "triton": "3.9.0"}
    return Report(
        kind="layer",
        date="2026-11-18",
        command="acmoe bench layer",
        environment=where,
        arguments={},
        rows=[row],
    )


def test_the_lines_between_columns_go_first() -> None:
    wide, narrow = (shown(a_report("tiny"), width) for width in (120, 80))
    assert any("\u2502 transformers-eager \u2502" in line for line in wide)
    (line,) = (line for line in narrow if "transformers-eager" in line)
    # The columns are 5, 18, 4, 15, 8, 8, 9 and 7 characters wide, with a blank between.
    assert line.split() == ["tiny", "transformers-eager", "f+b", "26.588", *line.split()[4:]]
    assert line.split()[4:] == ["0.000532", "1%", "12,345", "2.6e-07"]
    assert any("(26.124-27.052)" in line for line in narrow)


def test_a_long_shape_is_the_title_of_its_own_table() -> None:
    lines = shown(a_report("16384x2048x1024x128x8-gelu"), 80)
    assert "shape 16384x2048x1024x128x8-gelu" in " ".join(" ".join(lines).split())
    assert any("transformers-eager" in line and "0.000532" in line for line in lines)


def test_a_terminal_too_narrow_for_the_words_hides_nothing() -> None:
    lines = shown(a_report("tiny"), 60)
    assert max(map(len, lines)) <= 60
    columns = zip(*(line.split("\u2502") for line in lines if "\u2502" in line), strict=True)
    joined = {"".join("".join(column).split()) for column in columns}
    assert {"transformers-eager", "26.588(26.124-27.052)", "0.000532", "2.6e-07"} <= joined
