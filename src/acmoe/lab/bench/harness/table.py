"""Format reports as tables: the cells for the terminal, and pages of the documentation."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from acmoe.errors import UserError
from acmoe.lab.bench.harness.options import BOTH
from acmoe.lab.bench.harness.results import Report, newest, software
from acmoe.lab.marked_page import replace_between

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


class Column(NamedTuple):
    """A column: its heading, and a function that formats its cell of a row."""

    heading: str
    text: Callable[[dict[str, Any]], str]


def _number(field: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "" if row[field] is None else format(row[field], form)


def _ms(row: dict[str, Any]) -> str:
    """Format the median with its quartiles, or the reason why there is none."""
    if row["refused"] is not None:
        return f"refused: {row['refused']}"
    return f"{row['ms']:.3f} ({row['ms_low']:.3f}-{row['ms_high']:.3f})"


def _error(row: dict[str, Any]) -> str:
    """Format the larger of the errors of output and gradient; a forward pass has no gradient."""
    errors = [row[name] for name in ("forward_error", "gradient_error") if row[name] is not None]
    return f"{max(errors):.1e}" if errors else ""


def _part(row: dict[str, Any]) -> str:
    return "f+b" if row["part"] == BOTH else str(row["part"])


def _added(row: dict[str, Any]) -> str:
    """Format the extra time with its interval, which reports of older versions lack."""
    low, high = row.get("added_percent_low"), row.get("added_percent_high")
    interval = "" if low is None else f" ({low:+.2f} to {high:+.2f})"
    return _percent(row.get("added_percent")) + interval


def _blocks(row: dict[str, Any]) -> str:
    return "no pipeline" if row["blocks"] is None else " ".join(map(str, row["blocks"]))


def _rate(row: dict[str, Any]) -> str:
    return "" if row["items"] is None else f"{row['items_per_second']:,.0f} {row['items']}"


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "layer": (
        Column("shape", _number("shape", "")),
        Column("layer", _number("contestant", "")),
        Column("pass", _part),
        Column("ms (quartiles)", _ms),
        Column("TFLOP/s", _number("tflops", ".3g")),
        Column("of dense", _number("of_ceiling", ".0%")),
        Column("extra MiB", _number("memory_mib", ",.0f")),
        Column("error", _error),
    ),
    "router": (
        Column("shape", _number("shape", "")),
        Column("statistics", _number("mode", "")),
        Column("pass", _part),
        Column("ms (quartiles)", _ms),
        Column("added ms", _number("added_ms", "+.3f")),
        Column("added (95% interval)", _added),
        Column("floor ms", _number("floor_ms", ".3f")),
        Column("added memory", lambda row: _percent(row["added_memory_percent"])),
    ),
    "train": (
        Column("model", _number("model", "")),
        Column("router", _number("router", "")),
        Column("variant", _number("variant", "")),
        Column("ms a step (quartiles)", _ms),
        Column("a second", _rate),
        Column("added (95% interval)", _added),
        Column("extra MiB", _number("memory_mib", ",.0f")),
    ),
    "hf": (
        Column("model", lambda row: f"{row['model']}, {row['layers']} layers"),
        Column("part", lambda row: f"{row['part']}, {row['tokens']:,} tokens"),
        Column("experts", _number("implementation", "")),
        Column("ms (quartiles)", _ms),
        Column("tokens/s", _number("tokens_per_second", ",.0f")),
        Column("speedup", _number("ratio", ".2f")),
        Column("extra MiB", _number("memory_mib", ",.0f")),
    ),
    "generate": (
        Column("model", _number("model", "")),
        Column("router", lambda row: row.get("router") or ""),
        Column("sequences", _number("batch", "")),
        Column("steps", _number("contestant", "")),
        Column("ms a step", lambda row: row["refused"] or f"{row['ms_per_step']:.3f}"),
        Column("tokens a second", _number("tokens_per_second", ",.0f")),
        Column("added (95% interval)", _added),
        Column("whole call, s", _number("seconds", ".2f")),
    ),
    "profile": (
        Column("what", _number("subject", "")),
        Column("kernel", _number("kernel", "")),
        Column("launches", _number("launches", ".0f")),
        Column("us", _number("us", ",.1f")),
        Column("share", _number("share", ".1%")),
    ),
    "host": (
        Column("shape", _number("shape", "")),
        Column("statistics", _number("mode", "")),
        Column("pass", _part),
        Column(
            "us of the host (quartiles)",
            lambda row: f"{row['us']:,.0f} ({row['us_low']:,.0f}-{row['us_high']:,.0f})",
        ),
    ),
    "tune": (
        Column("shape", _number("shape", "")),
        Column("kernel", _number("kernel", "")),
        Column("blocks", _blocks),
        Column("ms", _number("ms", ".3f")),
        Column("TFLOP/s", _number("tflops", ".3g")),
        Column("second best ms", _number("second_ms", ".3f")),
    ),
}


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}%"


def columns_of(report: Report) -> tuple[Column, ...]:
    """Return the columns for the report's kind; layer-skew has the columns of layer."""
    family = report.kind.split("-")[0]
    if family not in _COLUMNS:
        raise UserError(f"kind={report.kind!r} of a report is unknown; delete the file")
    return _COLUMNS[family]


def cells(report: Report) -> list[list[str]]:
    rows = [row for row in report.rows if row.get("absent") is None]
    return [[column.text(row) for column in columns_of(report)] for row in rows]


def absences(report: Report) -> list[str]:
    """Return one line per implementation that could not run, with the reason and the shapes."""
    where: dict[str, list[str]] = {}
    for row in report.rows:
        if row.get("absent") is not None:
            line = f"{row['contestant']} took no part, {row['absent']}"
            where.setdefault(line, []).append(row["shape"])
    return [f"{line}: {', '.join(shapes)}" for line, shapes in where.items()]


def markdown(report: Report) -> str:
    """Format a section: the command that repeats the measurement, the machine, and the table."""
    where = report.environment
    headings = [column.heading for column in columns_of(report)]
    lines = [
        f"### {report.kind}, {where['device']}",
        "",
        f"```\n{report.command}\n```",
        "",
        f"{report.date}, {software(report)}, commit {where['commit'] or 'not recorded'}",
        "",
        _line(headings),
        _line(["---"] * len(headings)),
        *(_line(row) for row in cells(report)),
        *("", *(f"- {line}" for line in absences(report))),
    ]
    return "\n".join(lines).rstrip()


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def update_page(page: Path, folder: Path) -> int:
    """Write the newest reports between the page's markers, and return their number."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    reports = newest(folder)
    body = "\n\n".join(markdown(report) for report in reports) or "No figures yet."
    page.write_text(replace_between(text, BEGIN, END, body, page=str(page)), encoding="utf-8")
    return len(reports)
