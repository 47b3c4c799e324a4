"""The help of `acmoe bench` names the limits of its options."""

import pytest

from command import acmoe


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
