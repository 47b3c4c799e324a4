"""The tutorial's code runs as it stands, and the notebook in examples/ is the same page."""

import json
from pathlib import Path
from typing import Any

import pytest
import tutorial

from acmoe.cli import main

CODE = [text for kind, text in tutorial.cells() if kind == "code"]


def run(blocks: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number + 1} of the tutorial", "exec"), names)
    return names


def test_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(CODE)
    assert len(CODE) == 7
    adaptive = [layer.adaptive for layer in names["analysis"].layers]
    assert adaptive == [False, True, True, True]
    assert names["analysis"].layers[2].scale.rms_log > 0.05  # M is not the identity
    assert "scale: M is" in capsys.readouterr().out
    for arguments in tutorial.commands():
        with pytest.raises(SystemExit) as stop:
            main(arguments + (["--no-figures"] if arguments[0] == "analyze" else []))
        assert stop.value.code == 0
    assert (tmp_path / "tiny-acmoe" / "report.html").is_file()
    found = json.loads((tmp_path / "tiny-acmoe" / "analysis" / "analysis.json").read_text())
    assert found["statistics"] == "running"
    assert [layer["adaptive"] for layer in found["layers"]] == adaptive


def test_the_notebook_is_the_page() -> None:
    written = json.loads(tutorial.NOTEBOOK.read_text(encoding="utf-8"))
    assert written == tutorial.notebook(), "run tests/hf/tutorial.py > examples/huggingface.ipynb"
    code = ["".join(c["source"]) for c in written["cells"] if c["cell_type"] == "code"]
    assert code == CODE
    assert all(not cell.get("outputs") for cell in written["cells"])


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(tutorial.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    run(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"])
