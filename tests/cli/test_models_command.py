"""`acmoe models`: the list of models, as JSON, as a page and for terminals of every width."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from acmoe.models import table
from command_call import call

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _rows_counted_once() -> Iterator[None]:
    """Count the parameters of all models once: it takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "model_rows", functools.cache(table.model_rows))
        yield


def test_models_lists_every_size_as_json(capsys):
    code, out, _ = call(capsys, "models", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["switch-medium"]["parameters"] == 215_679_863
    # 16 experts of 2 (352^2 + 352) numbers in 6 layers, 2 of them active: 14/16 of them idle.
    idle = 6 * 14 * 2 * (352 * 352 + 352)
    assert rows["switch-medium"]["active_parameters"] == 215_679_863 - idle


@pytest.mark.parametrize("columns", ["40", "80", "120", "200"])
def test_models_cuts_no_name_and_no_number(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = call(capsys, "models")
    assert code == 0
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "\u2026" not in out  # the character for cut text
    lines = [line.replace("\u2502", " ").split() for line in out.splitlines()]
    for name, number in (("switch-enwik8-published", "36,076,717"), ("swin-base", "497,294,696")):
        (found,) = [line for line in lines if line[:1] in ([name], [f"{name}:"])]
        assert number in found


def test_models_needs_no_more_than_four_lines_of_80_for_a_model(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, "models")
    firsts = [number for number, line in enumerate(out.splitlines()) if line[0] != " "]
    assert len(firsts) == len(json.loads(call(capsys, "models", "--json")[1]))
    ends = [*firsts[1:], len(out.splitlines())]
    assert max(end - first for first, end in zip(firsts, ends, strict=True)) <= 4


def test_the_page_of_models_holds_the_table_that_models_prints(capsys):
    _, out, _ = call(capsys, "models", "--markdown")
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert out.strip() in page, "run `acmoe models --markdown` and paste it between the markers"
