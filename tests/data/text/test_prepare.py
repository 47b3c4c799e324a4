"""`prepare` leaves a finished folder or none, says what it found, and touches nothing of others."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from acmoe.config.text.data import PrepareConfig
from acmoe.data.text.corpus import load_corpus, read_manifest
from acmoe.data.text.prepare import prepare
from acmoe.errors import UserError

TEXT = {"train": "the cat sat\non the mat\n", "valid": "the mat\n", "test": "a cat\n"}


def words(folder: Path, **changes: str) -> Path:
    folder.mkdir(exist_ok=True)
    for split, text in (TEXT | changes).items():
        (folder / f"wiki.{split}.tokens").write_text(text)
    return folder


def test_a_second_run_with_the_same_source_changes_nothing(tmp_path: Path) -> None:
    source, out = words(tmp_path / "source"), tmp_path / "data" / "words"
    first = prepare("words", source, out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    second = prepare("words", source, out)
    assert (first.created, second.created) == (True, False)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    # <eos> the cat sat on mat a, and <unk> added: 8 symbols; 8, 3 and 3 tokens.
    assert first.counts == second.counts == {"train": 8, "valid": 3, "test": 3}
    assert first.vocabulary_size == second.vocabulary_size == 8
    assert sorted(path.name for path in out.parent.iterdir()) == ["words"]


def test_another_source_replaces_the_corpus_and_what_was_derived_from_it(tmp_path: Path) -> None:
    out = tmp_path / "words"
    prepare("words", words(tmp_path / "source"), out)
    (out / "contaminated").mkdir()
    again = prepare("words", words(tmp_path / "source", valid="a new text here\n"), out)
    assert again.created and again.counts["valid"] == 5
    assert load_corpus(out, verify=True)["valid"].shape == (5,)
    assert not (out / "contaminated").exists()


def test_other_options_replace_the_corpus(tmp_path: Path) -> None:
    source, out = words(tmp_path / "source"), tmp_path / "words"
    prepare("words", source, out)
    capped = prepare("words", source, out, config=PrepareConfig(min_count=2))
    # Twice in training: only "the".
    assert capped.created and capped.vocabulary_size == 3
    assert not prepare("words", source, out, config=PrepareConfig(min_count=2)).created


def test_a_damaged_corpus_is_made_again(tmp_path: Path) -> None:
    source, out = words(tmp_path / "source"), tmp_path / "words"
    prepare("words", source, out)
    (out / "valid.npy").write_bytes(b"")
    assert prepare("words", source, out).created
    (out / "manifest.json").write_text("{")
    assert prepare("words", source, out).created
    assert load_corpus(out, verify=True)["valid"].tolist() == [1, 5, 0]


def test_the_manifest_tells_where_the_corpus_came_from(tmp_path: Path) -> None:
    source, out = words(tmp_path / "source"), tmp_path / "words"
    config = PrepareConfig(title="my cats")
    prepare("words", source, out, config=config)
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("acmoe-corpus", 1)
    assert (manifest["name"], manifest["title"]) == ("words", "my cats")
    assert (manifest["kind"], manifest["published"]) == ("words", False)
    assert [record["file"] for record in manifest["sources"]] == [
        "wiki.train.tokens",
        "wiki.valid.tokens",
        "wiki.test.tokens",
    ]
    assert manifest["sources"][1]["bytes"] == 8
    assert manifest["splits"]["train"]["tokens"] == 8
    assert manifest["splits"]["train"]["dtype"] == "uint8"
    assert str(tmp_path) not in (out / "manifest.json").read_text()


def test_equal_sources_give_equal_folders_wherever_they_lie(tmp_path: Path) -> None:
    for place in ("a", "b"):
        prepare("words", words(tmp_path / place), tmp_path / f"out_{place}", config=PrepareConfig())
    for file in ("train.npy", "valid.npy", "test.npy", "vocabulary.json"):
        assert (tmp_path / "out_a" / file).read_bytes() == (tmp_path / "out_b" / file).read_bytes()


def test_files_may_be_given_one_by_one_and_compressed(tmp_path: Path) -> None:
    for split, text in TEXT.items():
        (tmp_path / f"my_{split}.xz").write_bytes(lzma.compress(text.encode()))
    files = {split: tmp_path / f"my_{split}.xz" for split in TEXT}
    prepare("words", files, tmp_path / "given")
    prepare("words", words(tmp_path / "source"), tmp_path / "found")
    given, found = load_corpus(tmp_path / "given"), load_corpus(tmp_path / "found")
    assert given.vocabulary == found.vocabulary
    assert all(given[split].tolist() == found[split].tolist() for split in TEXT)


def test_a_text_that_is_not_the_published_one_is_refused_unless_allowed(tmp_path: Path) -> None:
    source, out = words(tmp_path / "source"), tmp_path / "wikitext103"
    with pytest.raises(UserError, match="train has 8 tokens, expected 103,227,021; fetch the real"):
        prepare("wikitext103", source, out)
    assert not out.exists()
    allowed = prepare("wikitext103", source, out, config=PrepareConfig(allow_other_counts=True))
    assert allowed.title == "source (words)"  # never reported under the published name
    assert not read_manifest(out).published
    with pytest.raises(UserError, match="expected 103,227,021"):
        prepare("wikitext103", source, out)


def test_enwik8_keeps_the_values_it_uses_and_other_files_all_256(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"abc\n" * 25))
    config = PrepareConfig(allow_other_counts=True)
    enwik8 = prepare("enwik8", tmp_path / "text.gz", tmp_path / "enwik8", config=config)
    assert enwik8.vocabulary_size == 4
    assert enwik8.counts == {"train": 90, "valid": 5, "test": 5}
    assert prepare("bytes", tmp_path / "text.gz", tmp_path / "bytes").vocabulary_size == 256
    with pytest.raises(UserError, match="enwik8: train has 90 tokens, expected 90,000,000"):
        prepare("enwik8", tmp_path / "text.gz", tmp_path / "enwik8")


def test_a_limit_shortens_a_byte_corpus(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc\n" * 100)
    limited = prepare("bytes", tmp_path / "text", tmp_path / "out", config=PrepareConfig(limit=100))
    assert limited.counts == {"train": 90, "valid": 5, "test": 5}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("bytes", PrepareConfig(min_count=2), "min_count and max_vocabulary are for word corpora"),
        ("sst2", PrepareConfig(max_vocabulary=9), "are for word corpora; sst2"),
        ("words", PrepareConfig(limit=100), "limit=100 is for byte-level corpora"),
        ("sst2", PrepareConfig(title="x"), "sst2 has its own name"),
        ("novels", PrepareConfig(), "data set 'novels' is not known; choose one of stdlib, wiki"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    tmp_path: Path, name: str, config: PrepareConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(name, tmp_path, tmp_path / "out", config=config)


@pytest.mark.parametrize("name", ["words", "enwik8", "sst2"])
def test_a_source_is_asked_for_with_its_layout(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} needs .*; got None"):
        prepare(name, None, tmp_path / "out")


@pytest.mark.parametrize("name", ["enwik8", "sst2", "stdlib"])
def test_only_words_take_a_file_for_each_split(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} needs "):
        prepare(name, {"train": tmp_path}, tmp_path / "out")


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    source, out = words(tmp_path / "source"), tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.txt").write_text("precious")
    (out / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds chapter1\.txt, which is no prepared data"):
        prepare("words", source, out)
    assert (out / "chapter1.txt").read_text() == "precious"
    with pytest.raises(UserError, match="is a file; expected a folder"):
        prepare("words", source, out / "chapter1.txt")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert prepare("words", words(tmp_path / "source"), tmp_path / "out").created


def test_a_folder_that_holds_another_data_set_is_not_replaced(tmp_path: Path) -> None:
    prepare("words", words(tmp_path / "source"), tmp_path / "out")
    (tmp_path / "text").write_bytes(b"abc\n" * 100)
    with pytest.raises(UserError, match="holds the prepared data set 'words'"):
        prepare("bytes", tmp_path / "text", tmp_path / "out")


def test_a_broken_source_leaves_no_folder_behind(tmp_path: Path) -> None:
    source = words(tmp_path / "source")
    (source / "wiki.test.tokens").write_bytes(b"fine\n\xff\n")
    with pytest.raises(UserError, match=r"wiki\.test\.tokens: line 2, byte 1 .0xff. is not UTF-8"):
        prepare("words", source, tmp_path / "data" / "out")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*out: "):
        prepare("words", words(tmp_path / "source"), tmp_path / "file" / "out")


def test_sentences_are_checked_and_copied_without_compression(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "sst2"
    source.mkdir()
    rows = b"sentence\tlabel\ngood\t1\nbad\t0\n"
    (source / "train.tsv.xz").write_bytes(lzma.compress(rows))
    (source / "dev.tsv").write_bytes(rows)
    first = prepare("sst2", source, out)
    assert first.created and first.counts == {"train": 2, "dev": 2}
    assert (out / "train.tsv").read_bytes() == rows
    assert not prepare("sst2", source, out).created
    (out / "train.tsv").write_bytes(rows[:-1])
    assert prepare("sst2", source, out).created


@pytest.mark.parametrize(
    "fields", [{"min_count": 0}, {"max_vocabulary": 2}, {"limit": 39}, {"limit": -1}]
)
def test_an_impossible_option_is_refused_by_name(fields: dict[str, int]) -> None:
    (field,) = fields
    with pytest.raises(UserError, match=f"{field}={fields[field]} must be"):
        PrepareConfig(**fields)  # type: ignore[arg-type]
