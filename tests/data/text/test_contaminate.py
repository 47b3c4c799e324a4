"""One seed gives one corrupted corpus, kept on disk and shared by every model."""

from pathlib import Path
from typing import Any

import pytest

from acmoe.config.text.data import ContaminationConfig
from acmoe.data.text.contaminate import contaminate, contaminate_stream
from acmoe.data.text.corpus import Corpus, load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.errors import UserError


@pytest.fixture
def words(tmp_path: Path) -> Corpus:
    source = tmp_path / "source"
    source.mkdir()
    line = " ".join(f"noun{i}" for i in range(40)) + "\n"
    for split in ("train", "valid", "test"):
        (source / f"{split}.txt").write_text("AAA\n" + line * 50)
    prepare("words", source, tmp_path / "words")
    return load_corpus(tmp_path / "words")


@pytest.fixture
def octets(tmp_path: Path) -> Corpus:
    (tmp_path / "text").write_bytes(b"some text\n" * 4000)
    prepare("bytes", tmp_path / "text", tmp_path / "bytes")
    return load_corpus(tmp_path / "bytes")


def test_the_same_seed_gives_the_same_text_and_is_made_once(words: Corpus) -> None:
    first = contaminate(words, "valid")
    (folder,) = (words.folder / "contaminated").iterdir()
    made = (folder / "valid.npy").stat().st_mtime_ns
    second = contaminate(load_corpus(words.folder), "valid")
    assert folder.name == "rate0.025-seed0"
    assert (folder / "valid.npy").stat().st_mtime_ns == made
    assert first.inputs.tolist() == second.inputs.tolist()
    assert first.report == second.report
    (folder / "manifest.json").unlink()
    again = contaminate(words, "valid")
    assert again.inputs.tolist() == first.inputs.tolist()  # made again, from the same seed


def test_seeds_and_splits_are_corrupted_differently(words: Corpus) -> None:
    valid, test = contaminate(words, "valid"), contaminate(words, "test")
    other = contaminate(words, "valid", ContaminationConfig(seed=1))
    assert words["valid"].tolist() == words["test"].tolist()
    assert valid.inputs.tolist() != test.inputs.tolist()
    assert valid.inputs.tolist() != other.inputs.tolist()


def test_the_report_counts_what_differs_from_the_clean_text(words: Corpus) -> None:
    exact = contaminate(words, "valid", ContaminationConfig(early_stop=False))
    # 50 lines of 40 nouns: floor(0.025 * 40) = 1 swap each, and 1 of AAA that changes nothing.
    assert (exact.report.nominal, exact.report.replaced, exact.report.changed) == (51, 51, 50)
    assert int((exact.inputs != words["valid"]).sum()) == exact.report.changed
    assert exact.inputs.dtype == words["valid"].dtype


def test_word_targets_are_corrupted_as_in_the_paper_unless_asked_otherwise(words: Corpus) -> None:
    paper = contaminate(words, "valid")
    assert paper.targets is paper.inputs
    clean = contaminate(words, "valid", ContaminationConfig(targets="clean"))
    assert clean.targets is words["valid"]
    assert clean.inputs.tolist() == paper.inputs.tolist()  # one corpus, whatever is predicted


def test_byte_targets_are_clean_unless_asked_otherwise(octets: Corpus) -> None:
    default = contaminate(octets, "test")
    assert default.targets is octets["test"]
    # 2,000 bytes at 0.05: 100 +- 10.
    assert abs(default.report.changed - 100) < 50
    both = contaminate(octets, "test", ContaminationConfig(targets="corrupted"))
    assert both.targets is both.inputs
    assert both.inputs.tolist() == default.inputs.tolist()


def test_a_damaged_or_outdated_corruption_is_made_again(words: Corpus, tmp_path: Path) -> None:
    first = contaminate(words, "valid").inputs.tolist()
    (folder,) = (words.folder / "contaminated").iterdir()
    (folder / "valid.npy").write_bytes(b"short")
    assert contaminate(words, "valid").inputs.tolist() == first
    manifest = folder / "manifest.json"
    sha256 = words.manifest.splits["valid"].sha256
    manifest.write_text(manifest.read_text().replace(sha256, "0" * 64))  # of another text
    assert contaminate(words, "valid").inputs.tolist() == first
    assert sha256 in manifest.read_text()


def test_training_text_stays_clean(words: Corpus) -> None:
    with pytest.raises(
        UserError, match="split 'train' is not corrupted; choose one of valid, test"
    ):
        contaminate(words, "train")


def test_bytes_have_no_early_stop(octets: Corpus) -> None:
    with pytest.raises(UserError, match="early_stop=False is for word corpora"):
        contaminate(octets, "test", ContaminationConfig(early_stop=False))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 0.0}, "rate=0.0 must lie between 0 and 1"),
        ({"rate": 1.0}, "rate=1.0 must lie between 0 and 1"),
        ({"rate": 2.5}, "rate=2.5 must lie .* fraction of words or bytes to replace"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"targets": "both"}, "targets='both' is not known"),
    ],
)
def test_an_impossible_contamination_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ContaminationConfig(**fields)


@pytest.mark.parametrize("kind", ["words", "octets"])
def test_a_further_text_is_corrupted_as_a_split_of_the_same_name_is(
    kind: str, request: pytest.FixtureRequest
) -> None:
    corpus = request.getfixturevalue(kind)
    config = ContaminationConfig(seed=3, rate=0.1)
    split = contaminate(corpus, "test", config)
    found = contaminate_stream(corpus, corpus["test"], "test", config)
    assert found.report == split.report
    assert found.inputs.tolist() == split.inputs.tolist() != corpus["test"].tolist()
    assert found.targets.tolist() == split.targets.tolist()
    other = contaminate_stream(corpus, corpus["test"], "another", config)
    assert other.inputs.tolist() != found.inputs.tolist()
