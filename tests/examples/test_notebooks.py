"""The notebooks in examples/ hold no outputs, their code runs, and their links lead to files.

tests/hf/test_tutorial.py runs huggingface.ipynb, which is the page docs/tutorial-huggingface.md.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(name: str, kind: str) -> list[str]:
    found = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def run(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for number, code in enumerate(cells(name, "code")):
        exec(compile(code, f"code cell {number + 1} of {name}.ipynb", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_form_of_nbformat_and_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_page_of_examples_names_every_script_and_notebook() -> None:
    page = (EXAMPLES.parent / "docs" / "start" / "examples.md").read_text(encoding="utf-8")
    files = {path.name for ending in ("py", "ipynb") for path in EXAMPLES.glob(f"*.{ending}")}
    assert set(re.findall(r"\b(\w+\.(?:py|ipynb))\b", page)) == files


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)", "\n".join(cells(path.stem, "markdown")))
    assert [link for link in links if "://" not in link and not (EXAMPLES / link).exists()] == []


def test_the_router_by_hand_gives_the_numbers_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'acmoe[plots]'").use(
        "agg"
    )
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    names = run("router_by_hand")  # its own cells compare it with the library
    text = "\n".join(cells("router_by_hand", "markdown"))
    assert "$M_0 = (1.833, 0.167)$" in text
    torch.testing.assert_close(names["M"][0], torch.tensor([1.833, 0.167]), atol=5e-4, rtol=0)
    moved = (names["plain"].argmax(1) != names["adaptive"].argmax(1)).nonzero().flatten()
    assert "Tokens 1 and 6" in text and moved.tolist() == [1, 6]


@pytest.mark.slow
def test_a_run_is_trained_and_read_in_the_notebook() -> None:
    names = run("read_run")
    assert [record["step"] for record in names["run"].metrics("valid")] == [10, 20]
    assert [layer.scale is None for layer in names["analysis"].layers] == [True] + 3 * [False]
    assert 0 < names["moved"] < 1
    assert names["png"].is_file() and names["svg"].is_file()
