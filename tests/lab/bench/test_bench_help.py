"""The help of `acmoe bench` names the limits of its options."""

import json
from pathlib import Path

import pytest

from command import acmoe


@pytest.mark.parametrize("name", ["layer", "router", "host", "profile"])
def test_one_option_leaves_the_backward_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert acmoe("bench", name, "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "without gradients" in text[text.index("--forward") :][:200]


def test_forward_alone_is_in_table_json_and_saved_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    words = ("--device", "cpu", "--shapes", "tiny-relu", "--rivals", "torch", "--repeat", 2)
    assert acmoe("bench", "layer", "--forward", *words) == 0
    table = capsys.readouterr().out
    assert "layer-forward" in table and "forward" in table and "f+b" not in table
    assert acmoe("bench", "layer", "--forward", *words, "--json", "--save") == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = (tmp_path / "benchmarks" / "results").glob("*-layer-forward-*.json")
    assert json.loads(path.read_text()) == printed
    assert {row["part"] for row in printed["rows"]} == {"one product", "forward"}
    assert (
        printed["command"].startswith("acmoe bench layer ") and " --forward" in printed["command"]
    )


def test_which_refuses_options_of_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert acmoe("bench", "--which", "layer", "--forward") == 2
    wanted = (
        "acmoe: --which measures nothing, so that --forward has no effect; leave one of them out"
    )
    assert capsys.readouterr().err == wanted + "\n"
    assert acmoe("bench", "--which", "layer", "--shapes", "tiny") == 0


@pytest.mark.parametrize("name", ["layer", "router", "train", "hf", "host", "tune"])
def test_a_single_round_is_refused_and_the_help_says_so(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acmoe("bench", name, "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    option = text[text.index("--repeat") :].split("--device")[0].split("--json")[0]
    assert "at least 2" in option
    assert acmoe("bench", name, "--repeat", 1) == 2
    assert capsys.readouterr().err == "acmoe: repeat=1; quartiles need at least 2 rounds\n"
