"""`acmoe report`: what it writes, says and refuses."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from acmoe.cli import main
from tiny_runs import byte_corpus, tiny_run, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report-command")
    return trained(tiny_run(byte_corpus(folder), "steps=2"), folder / "run")


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, arguments)])
    shown = capsys.readouterr()
    return stop.value.code, shown.out, shown.err


def test_one_run_gets_its_report_into_its_folder(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, run, "--tokens", 16)
    assert (code, err) == (0, "")
    assert out == f"wrote {run / 'report.html'}: open it in a browser\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_the_file_may_be_named_and_its_folder_made(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "page.html"
    assert call(capsys, run, run, "-o", out, "--tokens", 16)[0] == 0
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no run given"),
        (("nowhere",), "nowhere is no folder"),
        ((".",), "is no run"),
        (("{run}", "--tokens", "2"), "--tokens 2"),
        (("{run}", "--port", "80"), "--port 80 is for --serve"),
        (("{run}", "--serve", "-o", "x.html"), "which writes no file; leave one of them out"),
        (("{run}", "--serve", "--port", "99999"), "--port 99999 is no port"),
        (("{run}", "--device", "gpu"), "device='gpu'"),
        (("{run}", "--out", "."), "--out . is a folder; name a file in it"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *(argument.format(run=run) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("acmoe: ") and err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said_in_a_line_each(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "config.json").write_bytes((run / "config.json").read_bytes())
    code, out, err = call(capsys, run, folder, "-o", tmp_path / "report.html", "--tokens", 16)
    assert code == 0
    assert out.startswith("wrote ")
    lines = err.splitlines()
    assert lines[0] == "young: metrics.jsonl is not there yet: nothing has been measured"
    assert lines[1].startswith("young: no routing: ")
    assert len(lines) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_serving_ends_cleanly_on_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "acmoe", "report", str(run), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None and it.stderr is not None
        first = it.stdout.readline()
        assert first.startswith("http://127.0.0.1:")
        assert first.endswith("/ shows 1 run; ctrl-C ends it\n")
        os.kill(it.pid, signal.SIGINT)
        assert it.wait(timeout=30) == 0
        assert it.stdout.read() == "\nstopped\n"
        assert it.stderr.read() == ""


@pytest.mark.slow
def test_the_demo_ends_in_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--steps", "20", "--out", str(tmp_path)])
    assert stop.value.code == 0
    assert f"open {tmp_path / 'report.html'} in a browser" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"name":"smoe"' in page and '"name":"acmoe"' in page
    assert "of bytes replaced" in page
    assert len(page.encode()) < 5_000_000
