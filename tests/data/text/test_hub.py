"""The hub's rows become the local files `prepare` takes; its absence is one clear line."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from acmoe.config.text.data import PrepareConfig
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.hub import download
from acmoe.data.text.prepare import prepare
from acmoe.data.text.sentences import load_sentences
from acmoe.errors import UserError


class FakeHub(ModuleType):
    """Stands for the `datasets` package: rows by (id, variant, split)."""

    def __init__(self, rows: dict[tuple[str, str | None, str], list[dict[str, Any]]]) -> None:
        super().__init__("datasets")
        self.rows, self.asked = rows, 0

    def load_dataset(self, name: str, variant: str | None, *, split: str) -> list[dict[str, Any]]:
        self.asked += 1
        if (name, variant, split) not in self.rows:
            raise ConnectionError(f"no route to {name}\nsecond line")
        return self.rows[name, variant, split]


def test_wikitext_rows_become_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, variant = "Salesforce/wikitext", "wikitext-103-v1"
    lines = [{"text": ""}, {"text": " = Lobster = \n"}, {"text": " blue animals \n"}]
    splits = ("train", "validation", "test")
    fake = FakeHub({(hub, variant, split): lines for split in splits})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    told: list[tuple[str, int, int]] = []
    source = download(
        "wikitext103", tmp_path / "raw", progress=lambda *arguments: told.append(arguments)
    )
    assert (source / "wiki.valid.tokens").read_text() == "\n = Lobster = \n blue animals \n"
    assert told[-1] == ("wiki.test.tokens", 3, 3)
    config = PrepareConfig(allow_other_counts=True)
    prepared = prepare("wikitext103", source, tmp_path / "out", config=config)
    # Blank line 1, heading 3 + 1, text 2 + 1.
    assert prepared.counts == {"train": 8, "valid": 8, "test": 8}
    assert load_corpus(tmp_path / "out")["train"].tolist() == [0, 1, 2, 1, 0, 3, 4, 0]
    download("wikitext103", tmp_path / "raw")
    assert fake.asked == 3  # what is there is not fetched again


def test_sentences_become_the_published_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sst2 = [{"sentence": "so\tgood ", "label": 1}, {"sentence": "bad", "label": 0}]
    sst5 = [{"text": f"grade {i}", "label": i} for i in range(5)]
    bank = [{"text": f'my "card",\n{i}', "label": i} for i in range(77)]
    rows = {
        ("stanfordnlp/sst2", None, "train"): sst2,
        ("stanfordnlp/sst2", None, "validation"): sst2,
        **{("SetFit/sst5", None, split): sst5 for split in ("train", "validation", "test")},
        **{("legacy-datasets/banking77", None, split): bank for split in ("train", "test")},
    }
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(rows))
    for name in ("sst2", "sst5", "banking77"):
        download(name, tmp_path / name)
    assert load_sentences("sst2", tmp_path / "sst2")["dev"] == [("so good", 1), ("bad", 0)]
    assert [row.label for row in load_sentences("sst5", tmp_path / "sst5")["test"]] == [*range(5)]
    banking = load_sentences("banking77", tmp_path / "banking77")
    assert banking["test"] == [(f'my "card",\n{i}', i) for i in range(77)]


def test_a_missing_extra_is_named_with_its_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the data extra: pip install 'acmoe\[data\]'"):
        download("sst2", tmp_path / "sst2")


def test_a_missing_network_is_one_line_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeHub({}))
    with pytest.raises(UserError, match=r"could not fetch SetFit/sst5 .*no route to SetFit/sst5\)"):
        download("sst5", tmp_path / "sst5")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["stdlib", "enwik8", "words"])
def test_what_is_not_on_the_hub_is_not_looked_for_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is not fetched from the hub; its source: "):
        download(name, tmp_path)
