"""Labelled sentences are read as published; a wrong file is named with its line."""

import gzip
import hashlib
from pathlib import Path

import pytest

from acmoe.data.text.sentences import (
    TASKS,
    Sentence,
    find_sentence_files,
    load_sentences,
    read_sentences,
    task_of,
)
from acmoe.errors import UserError

SST2, SST5, BANKING = TASKS["sst2"], TASKS["sst5"], TASKS["banking77"]

# SHA-256 of the 77 published names, one a line, in the published order.
DIGEST = "6403179281fde61a"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_quotes_mean_nothing_in_tab_separated_text_and_the_header_is_optional(
    tmp_path: Path,
) -> None:
    rows = "a \"quoted word\t1\nit 's , flat .\t0\n"
    expected = [Sentence('a "quoted word', 1), Sentence("it 's , flat .", 0)]
    plain = write(tmp_path, "plain.tsv", rows)
    headed = write(tmp_path, "headed.tsv", "sentence\tlabel\n" + rows.replace("\n", "\r\n"))
    assert read_sentences(SST2, "dev", plain) == expected
    assert read_sentences(SST2, "dev", headed) == expected


def test_a_quoted_text_may_hold_commas_quotes_and_newlines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "test.csv",
        'text,category\n"Well, ""where""\nis my card?",card_arrival\nToo young?,age_limit\n',
    )
    # Sorted without case: age_limit is 1 and card_arrival 11 in the published numbering.
    assert read_sentences(BANKING, "test", path) == [
        Sentence('Well, "where"\nis my card?', 11),
        Sentence("Too young?", 1),
    ]


def test_there_are_77_sorted_categories() -> None:
    assert len(set(BANKING.classes)) == 77
    assert list(BANKING.classes) == sorted(BANKING.classes, key=str.casefold)
    # Two published names are easily "corrected" by mistake.
    assert BANKING.classes[51] == "Refund_not_showing_up"
    assert BANKING.classes[53] == "reverted_card_payment?"
    assert hashlib.sha256("\n".join(BANKING.classes).encode()).hexdigest()[:16] == DIGEST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("good\t1\nbad\t2\n", "line 2: label '2'; sst2 expects 0, 1"),
        ("good\tpositive\n", "line 1: label 'positive'; sst2 expects 0, 1"),
        ("good\t1\nno tab here\n", "line 2 has 1 tab-separated columns; expected 2"),
        ("0\tgood\t1\n", "line 1 has 3 tab-separated columns; expected 2, sentence<TAB>label"),
        ("good\t1\n\nbad\t0\n", "line 2 has 1 tab-separated columns"),
        ("good\t1\n \t0\n", "line 2: the sentence is empty"),
        ("sentence\tlabel\n", "holds no sentence"),
        ("", r"x\.tsv is empty"),
        ("good\t1\nfine\t1\n", r"no row of 1 of the 2 classes .0 first.; is this sst2's training"),
    ],
)
def test_a_wrong_tab_separated_file_is_named_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_sentences(SST2, "train", write(tmp_path, "x.tsv", text))


def test_glues_test_file_without_labels_may_be_removed(tmp_path: Path) -> None:
    rows = "index\tsentence\n0\tuneasy mishmash of styles\n"
    message = "line 1: label 'sentence'; sst2 expects 0, 1; without labels remove test.tsv"
    with pytest.raises(UserError, match=message):
        read_sentences(SST2, "test", write(tmp_path, "test.tsv", rows))
    with pytest.raises(UserError, match=r"expects 0, 1$"):  # the training split is needed
        read_sentences(SST2, "train", write(tmp_path, "train.tsv", rows))


def test_the_file_of_another_task_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path, "train.tsv", "good\t1\nbad\t0\n")
    with pytest.raises(UserError, match=r"no row of 3 of the 5 classes .2 first.; is this sst5"):
        read_sentences(SST5, "train", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,label\nhi,3\n", "line 1 is 'text,label'; expected the header text,category"),
        ("hi,card_arrival\n", "expected the header text,category"),
        ("text,category\nhi,card_arival\n", "line 2: label 'card_arival'; banking77 expects one"),
        ("text,category\na,b,c\n", "line 2 has 3 columns; expected 2, text,category"),
        ('text,category\n"a\nb",card_arrival\nc\n', "line 4 has 1 columns"),
        ('text,category\n"never closed,card_arrival\n', "line 2: unexpected end of data"),
        ('text,category\n"a"b,card_arrival\n', "line 2: ',' expected after '\"'"),
        ("text,category\n", "holds no sentence"),
        ("text,category\nhi,card_arrival\n", "no row of 76 of the 77 classes .activate_my_card"),
    ],
)
def test_a_wrong_comma_separated_file_is_named_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_sentences(BANKING, "train", write(tmp_path, "x.csv", text))


def test_a_task_is_loaded_from_the_files_as_published(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "good\t1\nbad\t0\n")
    (tmp_path / "dev.tsv.gz").write_bytes(gzip.compress(b"fine\t1\n"))
    splits = load_sentences("sst2", str(tmp_path))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 2, "dev": 1}
    write(tmp_path, "test.tsv", "poor\t0\n")
    assert list(load_sentences("sst2", tmp_path)) == ["train", "dev", "test"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "good\t1\nbad\t0\n")
    with pytest.raises(UserError, match=r"has no dev\.tsv, plain, \.xz or \.gz; sst2 needs it"):
        find_sentence_files(SST2, tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        find_sentence_files(SST2, tmp_path / "absent")
    with pytest.raises(UserError, match="task 'cola' is not known; choose one of sst2, sst5, bank"):
        task_of("cola")
