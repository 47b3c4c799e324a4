"""A prepared corpus opens at once, and is refused when a file is not the recorded one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acmoe.data.text.corpus import Corpus, load_corpus
from acmoe.data.text.prepare import prepare
from acmoe.errors import UserError
from acmoe.storage.sealed import seal_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(b"some bytes\n" * 20)
    prepare("bytes", tmp_path / "text", tmp_path / "corpus")
    return tmp_path / "corpus"


def edit_manifest(folder: Path, **changes: Any) -> None:
    """Change fields and renew the checksum, so that a later check is the one that speaks."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | changes
    del content["seal"]
    path.write_text(json.dumps({**content, "seal": seal_of(content)}))


def test_the_splits_are_memory_mapped_and_read_only(folder: Path) -> None:
    corpus = load_corpus(str(folder))
    assert isinstance(corpus, Corpus)
    assert (corpus.name, corpus.kind, corpus.title) == ("bytes", "bytes", "text (bytes)")
    assert isinstance(corpus["train"], np.memmap)
    assert not corpus["train"].flags.writeable
    assert corpus.vocabulary.decode(corpus["train"][:11]) == "some bytes\n"
    assert len(corpus["train"]) + len(corpus["valid"]) + len(corpus["test"]) == 220


def test_an_unknown_split_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"split 'dev' is not in .*; choose one of train, valid"):
        load_corpus(folder)["dev"]


def test_a_folder_without_a_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no prepared corpus in .*; run `acmoe data prepare NAME`"):
        load_corpus(tmp_path)


def test_a_shortened_array_is_refused(folder: Path) -> None:
    path = folder / "valid.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"valid\.npy has 138 bytes, expected 139 as recorded"):
        load_corpus(folder)


def test_a_missing_array_is_refused(folder: Path) -> None:
    (folder / "test.npy").unlink()
    with pytest.raises(UserError, match=r"test\.npy is missing; delete .* and prepare 'bytes'"):
        load_corpus(folder)


@pytest.mark.parametrize("file", ["train.npy", "vocabulary.json"])
def test_a_changed_file_of_the_same_size_is_refused(folder: Path, file: str) -> None:
    path = folder / file
    data = path.read_bytes()
    last = data.rindex(b"\n") if file == "vocabulary.json" else len(data) - 1
    path.write_bytes(data[:last] + b" " + data[last + 1 :])
    load_corpus(folder, verify=False)  # by size alone it looks whole
    with pytest.raises(UserError, match=f"{file} was changed after it was written"):
        load_corpus(folder)


def test_an_array_outside_the_folder_is_refused(folder: Path) -> None:
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    splits["train"]["file"] = "../train.npy"
    edit_manifest(folder, splits=splits)
    with pytest.raises(UserError, match=r"file='\.\./train\.npy' in the manifest is not a file of"):
        load_corpus(folder)


def test_an_array_of_another_type_is_refused(folder: Path) -> None:
    # A 16-bit array of half the length has the same size on disk.
    length = len(load_corpus(folder)["train"])
    np.save(folder / "train.npy", np.zeros(length // 2, dtype=np.uint16))
    with pytest.raises(UserError, match=r"holds uint16 of shape .*, expected 198 uint8"):
        load_corpus(folder, verify=False)


def test_an_array_that_is_none_is_refused(folder: Path) -> None:
    path = folder / "train.npy"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(UserError, match="is no array of token ids"):
        load_corpus(folder, verify=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "is acmoe-corpus version 2, expected acmoe-corpus version 1"),
        ({"format": "other"}, "is other version 1, expected acmoe-corpus"),
        ({"vocabulary_size": 205}, "holds 256 bytes, expected 205 bytes"),
        ({"kind": "letters"}, r"manifest\.json is damaged: kind: Input should be"),
        ({"splits": {}}, "expected train, valid, test"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_manifest(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_corpus(folder)


def test_a_manifest_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"name": ')
    with pytest.raises(UserError, match=r"manifest\.json is damaged, it is not JSON"):
        load_corpus(folder)
