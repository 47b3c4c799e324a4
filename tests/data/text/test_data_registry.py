"""Every data set has a name, an origin and a place, and what lies there is told truly."""

from pathlib import Path

import pytest

from acmoe.data.text.prepare import prepare
from acmoe.data.text.registry import dataset, datasets, found
from acmoe.data.text.sentences import TASKS
from acmoe.errors import UserError


def test_the_first_data_set_needs_no_download_and_every_entry_is_complete() -> None:
    entries = datasets()
    assert entries[0].name == "stdlib" and entries[0].layout == ""
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.title and entry.about and entry.licence and entry.origin
        assert entry.layout or entry.name == "stdlib"
        assert dataset(entry.name) is entry
    assert {entry.name for entry in entries if entry.kind == "sentences"} == set(TASKS)


def test_the_published_counts_add_up() -> None:
    # EnWik-8 is 100,000,000 bytes; WikiText-103 has 103,690,236 tokens with its line ends.
    assert sum(dataset("enwik8").counts.values()) == 100_000_000
    assert sum(dataset("wikitext103").counts.values()) == 103_690_236


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data set 'imdb' is not known; choose one of stdlib"):
        found("imdb", tmp_path)


def test_found_tells_absent_prepared_and_damaged_corpora_apart(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc\n" * 25)
    assert found("bytes", tmp_path).state == "absent"
    prepare("bytes", tmp_path / "text", tmp_path / "bytes")
    there = found("bytes", tmp_path)
    assert (there.state, there.folder) == ("prepared", tmp_path / "bytes")
    assert there.detail == "text (bytes): train 90, valid 5, test 5"
    (tmp_path / "bytes" / "valid.npy").unlink()
    assert found("bytes", tmp_path).state == "damaged"
    (tmp_path / "bytes" / "manifest.json").write_text("{")
    assert "is damaged" in found("bytes", tmp_path).detail


def test_found_tells_absent_prepared_and_damaged_sentences_apart(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "dev"):
        (source / f"{split}.tsv").write_text("good\t1\nbad\t0\n")
    assert found("sst2", tmp_path).state == "absent"
    prepare("sst2", source, tmp_path / "sst2")
    assert found("sst2", tmp_path).detail == "train 2, dev 2"
    (tmp_path / "sst2" / "dev.tsv").write_text("good\t1\n")
    assert found("sst2", tmp_path).state == "damaged"


def test_another_data_set_in_its_place_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc\n" * 25)
    prepare("bytes", tmp_path / "text", tmp_path / "enwik8")
    assert found("enwik8", tmp_path).detail.endswith(
        "holds 'bytes', not 'enwik8'; move it away, and prepare 'enwik8' again"
    )
    assert found("sst2", tmp_path).state == "absent"
