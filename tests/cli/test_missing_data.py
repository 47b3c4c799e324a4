"""Commands without their data name what to type."""

from pathlib import Path

import pytest

from command import acmoe
from tiny_runs import byte_corpus, tiny_run, trained


@pytest.mark.parametrize(
    ("arguments", "where", "root"),
    [
        ((), "data/banking77", ""),
        (("--data", "empty"), "empty", ""),  # of another name: the command writes data/banking77
        (("--data", "my sets/banking77"), "my sets/banking77", " --root 'my sets'"),
    ],
)
def test_missing_sentences_name_the_commands_that_prepare_them(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    where: str,
    root: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    trained(tiny_run(byte_corpus(tmp_path), "steps=1"), tmp_path / "run")
    assert acmoe("finetune", "run", "--task", "banking77", *arguments) == 2
    assert capsys.readouterr().err == (
        f"acmoe: Banking-77 is not in {where}; run `acmoe data prepare banking77 --from hf{root}`, "
        "which downloads legacy-datasets/banking77, or `acmoe data prepare banking77 --from "
        f"PATH{root}` with a folder with train.csv, test.csv: text,category; or give its folder "
        "with --data\n"
    )


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            "switch-enwik8",
            "EnWik-8 is not prepared in data/enwik8; run `acmoe data prepare enwik8 --from PATH` "
            "with the file enwik8, or the folder it lies in (http://mattmahoney.net/dc/enwik8.zip, "
            "unzipped); or set data.folder",
        ),
        (
            "switch-medium",
            "WikiText-103 is not prepared in data/wikitext103; run `acmoe data prepare wikitext103 "
            "--from hf`, which downloads Salesforce/wikitext, or `acmoe data prepare wikitext103 "
            "--from PATH` with a folder with wiki.train.tokens, wiki.valid.tokens, "
            "wiki.test.tokens; or set data.folder",
        ),
        (
            "swin-small",
            "data/imagenet is no folder; put train/CLASS/ and val/CLASS/ there, or set data.source "
            "to a folder that has them",
        ),
    ],
)
def test_a_recipe_without_its_data_says_how_to_get_them(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert acmoe("train", recipe, "device=cpu") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"acmoe: {says}"
