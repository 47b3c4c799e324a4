"""Progress where nobody sees a bar: few lines, with the time that is left."""

import io
from pathlib import Path

from rich.console import Console

from acmoe.config.text.data import ContaminationConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.data.progress import ProgressLines, progress_bars
from acmoe.evaluate.language import evaluate
from tiny_runs import byte_corpus, tiny_run, trained


def test_a_line_after_three_seconds_and_then_every_ten() -> None:
    text, now = io.StringIO(), 0.0
    report = ProgressLines(Console(file=text, width=30), clock=lambda: now)
    for second in range(0, 25):
        now = float(second)
        report("valid text, tokens", 100 * second, 4000)
    assert text.getvalue().splitlines() == [  # 100 a second: 3700 take 37 seconds
        "valid text, tokens: 300 of 4,000, 37 s left",
        "valid text, tokens: 1,300 of 4,000, 27 s left",
        "valid text, tokens: 2,300 of 4,000, 17 s left",
    ]


def test_nothing_is_said_of_the_time_left_before_anything_is_done() -> None:
    text, now = io.StringIO(), 0.0
    report = ProgressLines(Console(file=text), clock=lambda: now)
    for second, done in ((0.0, 5), (4.0, 5), (14.0, 12)):
        now = second
        report("files", done, 26)
    # Seven files in 14 seconds: 14 files take 28.
    assert text.getvalue().splitlines() == ["files: 5 of 26", "files: 12 of 26, 28 s left"]


def test_a_stage_that_begins_again_is_timed_from_there() -> None:
    text, now = io.StringIO(), 0.0
    report = ProgressLines(Console(file=text), clock=lambda: now)
    # Read in a second, idle for six, and read again at 100 files a second.
    for second, done in ((0.0, 1), (1.0, 801), (7.0, 1), (9.0, 201), (11.0, 401)):
        now = second
        report("files", done, 801)
    assert text.getvalue().splitlines() == ["files: 401 of 801, 4 s left"]


def test_a_short_stage_prints_nothing_without_a_terminal_and_a_bar_on_one() -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    for console in (Console(file=plain), Console(file=terminal, force_terminal=True, width=80)):
        with progress_bars(console) as progress:
            progress("files", 1, 2)
            progress("files", 2, 2)
    assert plain.getvalue() == ""
    assert "files" in terminal.getvalue() and "100%" in terminal.getvalue()


def test_evaluating_text_reports_every_token_of_each_pass(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path, 60), "steps=1", "eval_tokens=50")
    run = trained(config, tmp_path / "run")
    calls: list[tuple[str, int, int]] = []
    report = evaluate(
        run,
        EvaluateConfig(statistics=("running",), contamination=ContaminationConfig()),
        device="cpu",
        progress=lambda *call: calls.append(call),
    )
    last = {stage: (done, total) for stage, done, total in calls}
    tokens = report.figure().tokens
    assert last == {
        "test text, statistics running, tokens": (tokens, tokens),
        "contaminated test text, statistics running, tokens": (tokens, tokens),
    }
