"""The published figures, on the published files; run where ACMOE_DATA names their folder.

Expected there, each plain, .xz or .gz: wikitext103/wiki.valid.tokens, sst2/, sst5/, banking77/ as
`prepare` takes them, and enwik8/enwik8 where the whole file is at hand.
"""

import os
from pathlib import Path

import pytest

from acmoe.config.text.data import ContaminationConfig
from acmoe.data.sources import find_file
from acmoe.data.text.contaminate import contaminate
from acmoe.data.text.corpus import load_corpus
from acmoe.data.text.prepare import prepare

DATA = Path(os.environ.get("ACMOE_DATA", ""))
pytestmark = pytest.mark.skipif("ACMOE_DATA" not in os.environ, reason="ACMOE_DATA is not set")


def real(folder: str, name: str) -> Path:
    path = find_file(DATA / folder, (name,))
    if path is None:
        pytest.skip(f"{folder}/{name} is not in {DATA}")
    return path


def test_the_validation_text_of_wikitext103_has_its_published_tokens_and_swaps(
    tmp_path: Path,
) -> None:
    valid = real("wikitext103", "wiki.valid.tokens")
    prepare("words", {"train": valid, "valid": valid, "test": valid}, tmp_path / "words")
    corpus = load_corpus(tmp_path / "words")
    assert len(corpus["valid"]) == 217_646
    # AAA is a word of the corpus, used five times in this text.
    assert int((corpus["valid"] == corpus.vocabulary.encode("AAA")[0]).sum()) == 5
    report = contaminate(corpus, "valid", ContaminationConfig(rate=0.025)).report
    # The test text was measured with the paper's tool: 2.44 % of words, 2.05 % of tokens drawn.
    assert abs(report.word_rate - 0.0244) < 0.001
    assert abs(report.replaced / report.tokens - 0.0205) < 0.001


@pytest.mark.parametrize(
    ("name", "file", "counts"),
    [
        ("sst2", "train.tsv", {"train": 67_349, "dev": 872, "test": 1_821}),
        ("sst5", "train.tsv", {"train": 8_544, "dev": 1_101, "test": 2_210}),
        ("banking77", "train.csv", {"train": 10_003, "test": 3_080}),
    ],
)
def test_the_sentence_sets_have_their_published_rows(
    tmp_path: Path, name: str, file: str, counts: dict[str, int]
) -> None:
    source = real(name, file).parent
    assert prepare(name, source, tmp_path / name).counts == counts


def test_enwik8_has_205_symbols(tmp_path: Path) -> None:
    prepared = prepare("enwik8", real("enwik8", "enwik8"), tmp_path / "enwik8")
    assert prepared.vocabulary_size == 205 and prepared.title == "EnWik-8"
