"""`acmoe analyze`: what it prints, writes and refuses."""

import json
import sys
from pathlib import Path

import pytest

from command import acmoe
from slow_cases import mostly_slow
from tiny_runs import tiny_run, trained, word_corpus

CONTENT = ("convergence", "load", "instability", "tsne")


def figures(folder: Path) -> set[str]:
    """Names of the figures, each of which is there as PNG and SVG."""
    names = [{path.stem for path in folder.glob(f"*.{kind}")} for kind in ("png", "svg")]
    assert names[0] == names[1]
    return names[0]


def test_a_text_run_is_measured_and_drawn_into_its_own_folder(
    text_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path for path in text_run.rglob("*") if path.is_file()}
    assert acmoe("analyze", text_run, "--tokens", 48, "--contaminate", 0.1) == 0
    printed = capsys.readouterr().out
    assert "the first 48 tokens" in printed
    assert "statistics running" in printed
    folder = text_run / "analysis"
    adaptive = {"scale_map_2", "scale_map_3", "colored_text", "attack_changes"}
    assert figures(folder) == {*CONTENT, *adaptive}
    written = {path for path in text_run.rglob("*") if path.is_file()} - before
    assert all(path.parent == folder for path in written)
    assert len(written) == 1 + 2 * 8
    layers = json.loads((folder / "analysis.json").read_text())["layers"]
    assert [layer["adaptive"] for layer in layers] == [False, True, True]


def test_json_is_what_was_written(
    text_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--tokens", 80, "--out", tmp_path / "there", "--no-figures", "--json")
    assert acmoe("analyze", text_run, *options) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "there" / "analysis.json").read_text())
    assert figures(tmp_path / "there") == set()


def test_the_statistics_asked_for_are_those_measured(
    text_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--tokens", 80, "--out", tmp_path, "--no-figures", "--json")
    scales = {}
    for mode in ("batch", "running"):
        assert acmoe("analyze", text_run, *common, "--statistics", mode) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["statistics"] == mode
        scales[mode] = found["layers"][1]["scale"]["rms_log"]
    assert scales["batch"] != scales["running"]


@mostly_slow("drawn", [False, True])
def test_an_image_run_is_measured_under_attack(
    drawn: bool, image_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = ("--attack", "pgd", "--eps", "4/255")
    assert acmoe("attack", image_run, *attack, "--limit", 16, "--device", "cpu") == 0
    options = ("--images", 3, *attack, "--device", "cpu", "--out", tmp_path)
    assert acmoe("analyze", image_run, *options, *([] if drawn else ["--no-figures"])) == 0
    printed = capsys.readouterr().out
    assert "pgd, eps 4/255:" in printed
    expected = {*CONTENT, "scale_map_2", "patches", "attack_changes", "pgd"}
    assert figures(tmp_path) == (expected if drawn else set())


def test_the_length_of_an_attack_is_an_option_and_its_progress_is_told(
    image_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("acmoe.data.progress.FIRST_LINE", 0.0)
    monkeypatch.setattr("acmoe.data.progress.NEXT_LINE", 0.0)
    attack = ("--attack", "spsa", "--steps", 2, "--directions", 3, "--images", 5, "--batch", 3)
    options = ("--device", "cpu", "--out", tmp_path, "--no-figures", "--json")
    assert acmoe("analyze", image_run, *attack, *options) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["disturbance"] == "spsa, eps 1/255, 2 steps, 3 directions"
    told = [line for line in printed.err.splitlines() if line.startswith("spsa")]
    # Two batches, of 3 and 2 images, with 2 steps of 3 directions each.
    expected = [f"spsa, eps 1/255, directions: {done} of 12" for done in range(13)]
    assert told[0] == expected[0]  # no time left is named before anything is done
    assert [line.rsplit(",", 1)[0] for line in told[1:]] == expected[1:]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--attack", "fgsm", "--steps", 3), "fgsm takes no --steps (3); leave it out"),
        (("--attack", "pgd", "--directions", 3), "pgd takes no --directions (3); leave it out"),
        (("--attack", "pgd", "--steps", 0), "steps=0; it must be at least 1"),
        (("--directions", 3), "--directions 3 without an attack; add --attack spsa"),
    ],
)
def test_an_option_that_the_attack_does_not_have_is_refused(
    image_run: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], says: str
) -> None:
    assert acmoe("analyze", image_run, *options) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"acmoe: {says}\n")


@pytest.mark.slow
def test_words_and_plain_routers_are_analysed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = word_corpus(tmp_path)
    size = json.loads((corpus / "manifest.json").read_text())["vocabulary_size"]
    settings = ("data.name=words", f"model.vocab_size={size}", "steps=2", "eval_tokens=60")
    run = trained(tiny_run(corpus, *settings, router="smoe"), tmp_path / "run")
    assert acmoe("analyze", run, "--tokens", 64, "--contaminate", 0.1) == 0
    assert "scale: M is the identity in every layer" in capsys.readouterr().out
    assert figures(run / "analysis") == {*CONTENT, "colored_text", "attack_changes"}


def test_without_matplotlib_the_figures_alone_are_missing(
    text_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert acmoe("analyze", text_run, "--tokens", 64, "--out", tmp_path, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["kind"] == "tokens"
    assert "no figures: figures need the plots extra" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["analysis.json"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--attack", "pgd"), "attack=pgd does not apply to"),
        (("--images", 5), "images=5 does not apply to"),
        (("--eps", "1/255"), "--eps 1/255 without an attack"),
        (("--tokens", 0), "tokens=0"),
        (("--seed", -1), "--seed -1; it must lie between 0 and 2**63 - 1"),
        (("--seed", 10**30), "it must lie between 0 and 2**63 - 1"),
        (("--contaminate", 2), "--contaminate 2.0; it must lie"),
        (("--statistics", "nosuch"), "nosuch"),
    ],
)
def test_a_mistake_is_one_line(
    text_run: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], says: str
) -> None:
    assert acmoe("analyze", text_run, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert says in printed.err


@pytest.mark.parametrize("mode", ["prefix", "sequence"])
def test_statistics_that_the_model_cannot_take_are_named_as_the_option(
    image_run: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    assert acmoe("analyze", image_run, "--statistics", mode, "--device", "cpu") == 2
    assert capsys.readouterr().err == (
        f"acmoe: statistics={mode} needs routers that measure the tokens of their own layer, and "
        "this model was trained with those of the previous layer; choose batch or running, or "
        "train with model.router.statistics_of=current\n"
    )


def test_contamination_is_refused_for_images(
    image_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acmoe("analyze", image_run, "--contaminate", 0.1) == 2
    assert "contaminate=0.1 does not apply to" in capsys.readouterr().err
