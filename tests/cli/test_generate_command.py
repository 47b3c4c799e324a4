"""`acmoe generate`: the text appears while it is generated, and ctrl-C keeps what is there."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from acmoe.cli.run.generate import GeneratedText
from acmoe.data.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from command import acmoe
from tiny_runs import QUIET, byte_corpus, tiny_run, train

Capture = pytest.CaptureFixture[str]
BYTES = ByteVocabulary(bytes(range(256)))
WORDS = WordVocabulary(("<eos>", "<unk>", "a", "tree"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    train(tiny_run(byte_corpus(folder), "steps=2"), folder / "run", console=QUIET)
    return folder / "run"


def at_token(number: int, then: Callable[[], None]) -> Callable[[GeneratedText, Tensor], None]:
    """Return an `add` that calls `then` after it has added token `number`."""
    add = GeneratedText.add

    def counted(text: GeneratedText, token_1: Tensor) -> None:
        add(text, token_1)
        if text.count + len(text._new) == number:
            then()

    return counted


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("vocabulary", "ids"),
    [
        (BYTES, [*"né 🧠".encode(), 0xFF, *"é".encode()[:1]]),  # it ends inside a character
        (WORDS, [2, 0, 0, 3, 1, 2]),
    ],
    ids=["bytes", "words"],
)
@pytest.mark.parametrize("every", [0.0, 1e9])
def test_the_pieces_join_to_the_decoded_text(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    vocabulary: Vocabulary,
    ids: list[int],
    every: float,
) -> None:
    monkeypatch.setattr("acmoe.cli.run.generate.SHOW_EVERY", every)
    text = GeneratedText("a", vocabulary, len(ids), shown=True)
    for token in ids:
        text.add(torch.tensor([token]))
    text.end()
    assert "".join(text.pieces) == vocabulary.decode(ids)
    between = " " if vocabulary is WORDS else ""
    assert capsys.readouterr().out == f"a{between}{vocabulary.decode(ids)}\n"


def test_the_text_is_there_before_its_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    options = ("generate", run, "--prompt", "line", "--tokens", 6)
    assert acmoe(*options) == 0
    whole = capsys.readouterr().out
    seen: list[str] = []
    monkeypatch.setattr("acmoe.cli.run.generate.SHOW_EVERY", 0.0)
    monkeypatch.setattr(
        GeneratedText, "add", at_token(3, lambda: seen.append(capsys.readouterr().out))
    )
    assert acmoe(*options) == 0
    assert seen[0].startswith("line") and len(seen[0]) > len("line")
    assert seen[0] + capsys.readouterr().out == whole


def test_ctrl_c_ends_a_text_of_any_length_and_keeps_what_is_there(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert acmoe("generate", run, "--prompt", "line", "--tokens", 5) == 0
    short = capsys.readouterr().out
    monkeypatch.setattr(GeneratedText, "add", at_token(5, interrupt))
    options = ("generate", run, "--prompt", "line", "--tokens", 10**12)
    for more in ((), ("--json",)):
        assert acmoe(*options, *more) == 128 + signal.SIGINT
        out, err = capsys.readouterr()
        assert err.endswith("acmoe: interrupted; 5 of 1,000,000,000,000 tokens are there\n")
        text = "line{text}\n".format(**json.loads(out)) if more else out
        assert text == short


def test_progress_is_told_where_the_text_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("acmoe.cli.run.generate.SHOW_EVERY", 0.0)
    monkeypatch.setattr("acmoe.data.progress.FIRST_LINE", 0.0)
    text = GeneratedText("a", BYTES, 10**12, shown=False)
    text.add(torch.tensor([97]))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "tokens: 1 of 1,000,000,000,000\n"  # one call tells no speed yet


def test_a_number_of_tokens_is_named_by_its_option(run: Path, capsys: Capture) -> None:
    assert acmoe("generate", run, "--prompt", "a", "--tokens", 0) == 2
    assert capsys.readouterr().err == "acmoe: --tokens 0; it must be at least 1\n"


def test_a_refused_option_prints_no_text(run: Path, capsys: Capture) -> None:
    assert acmoe("generate", run, "--prompt", "a", "--top-p", 5) == 2
    assert capsys.readouterr() == ("", "acmoe: top_p=5.0; it must lie in (0, 1]\n")


@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_a_model_that_fails_later_is_one_line_below_the_text(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, json_option: tuple[str, ...]
) -> None:
    from acmoe.models.text.generate import next_logits

    count = 0

    def spoilt(*arguments: object) -> Tensor:
        nonlocal count
        count += 1
        logits_BV = next_logits(*arguments)  # type: ignore[arg-type]
        return logits_BV * torch.nan if count > 5 else logits_BV

    monkeypatch.setattr("acmoe.cli.run.generate.SHOW_EVERY", 0.0)
    monkeypatch.setattr("acmoe.models.text.generate.next_logits", spoilt)
    assert acmoe("generate", run, "--prompt", "line", "--device", "cpu", *json_option) == 2
    out, err = capsys.readouterr()
    assert err == (
        "acmoe: the model gives NaN or infinity after 5 new tokens; load one with finite weights\n"
    )
    # The text that was shown while it was generated ends its line; JSON was not begun.
    assert out == "" if json_option else out.startswith("line") and out.endswith("\n")
