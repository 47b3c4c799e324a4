"""Word-level corpora follow WikiText's conventions to the token."""

import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.config.text.data import PrepareConfig
from acmoe.data.progress import silent
from acmoe.data.text import word_level
from acmoe.data.text.vocabulary import WordVocabulary
from acmoe.data.text.word_level import find_word_files, write_words
from acmoe.errors import UserError


def tokenise(
    folder: Path, train: str, valid: str, test: str, config: PrepareConfig | None = None
) -> tuple[WordVocabulary, dict[str, list[int]]]:
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    files = find_word_files(folder)
    vocabulary, counts = write_words(files, folder, config or PrepareConfig(), silent)
    tokens = {split: np.load(folder / f"{split}.npy").tolist() for split in files}
    assert counts == {split: len(ids) for split, ids in tokens.items()}
    return vocabulary, tokens


def test_words_are_numbered_as_they_first_appear_in_train_then_valid_then_test(
    tmp_path: Path,
) -> None:
    vocabulary, tokens = tokenise(tmp_path, "\n the cat \nThe cat\n", "a cat\n", "<unk> a dog\n")
    assert vocabulary.symbols == ("<eos>", "the", "cat", "The", "a", "<unk>", "dog")
    # The blank first line is one <eos>; the last line of each file has its own.
    assert tokens["train"] == [0, 1, 2, 0, 3, 2, 0]
    assert tokens["valid"] == [4, 2, 0]
    assert tokens["test"] == [5, 4, 6, 0]


def test_words_that_no_model_can_learn_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # "<unk>" stands in valid alone too, and is no such word; "x" and "y" are.
    tokenise(tmp_path, "a b\n", "<unk> x a\n", "y y b\n")
    assert "2 of 6 words are in the validation or test text alone, such as 'x'" in caplog.text
    caplog.clear()
    rare = PrepareConfig(max_vocabulary=4)
    tokenise(tmp_path, "a b\n", "<unk> x a\n", "y y b\n", rare)
    tokenise(tmp_path, "a b\n", "a\n", "b b\n")
    assert not caplog.text


def test_the_unknown_word_is_added_last_when_the_text_has_none(tmp_path: Path) -> None:
    vocabulary, _ = tokenise(tmp_path, "a b\n", "a\n", "b\n")
    assert vocabulary.symbols == ("<eos>", "a", "b", "<unk>")


def test_rare_words_are_counted_in_training_text_only(tmp_path: Path) -> None:
    # train: a 3 times, b twice, c once; c is frequent in valid, which must not count.
    config = PrepareConfig(min_count=2)
    vocabulary, tokens = tokenise(tmp_path, "c a b a b a\n", "c c c b\n", "d a\n", config)
    assert vocabulary.symbols == ("<eos>", "a", "b", "<unk>")
    assert tokens["train"] == [3, 1, 2, 1, 2, 1, 0]
    assert tokens["valid"] == [3, 3, 3, 2, 0]
    assert tokens["test"] == [3, 1, 0]


def test_a_capped_vocabulary_keeps_the_most_frequent_words_in_order_of_appearance(
    tmp_path: Path,
) -> None:
    # Counts: b 2, c 1, a 3, d 2. Four places: <eos>, <unk>, a, and b, which came before d.
    config = PrepareConfig(max_vocabulary=4)
    vocabulary, _ = tokenise(tmp_path, "b c a a\na d d b\n", "e\n", "e\n", config)
    assert vocabulary.symbols == ("<eos>", "b", "a", "<unk>")


def test_an_unknown_word_in_the_text_keeps_its_place_under_a_cap(tmp_path: Path) -> None:
    config = PrepareConfig(min_count=2)
    vocabulary, tokens = tokenise(tmp_path, "<unk> a a b\n", "b\n", "a\n", config)
    assert vocabulary.symbols == ("<eos>", "<unk>", "a")
    assert tokens["valid"] == [1, 0]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.sampled_from(["a", "B", "ç", "@-@", "<unk>"])), min_size=1))
def test_token_count_is_words_plus_lines_and_decoding_gives_the_text_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("words")
    text = "".join(" ".join(line) + "\n" for line in lines)
    vocabulary, tokens = tokenise(folder, text + "a\n", "a\n", "a\n")
    assert len(tokens["train"]) == sum(len(line) + 1 for line in lines) + 2
    decoded = [line.split() for line in vocabulary.decode(tokens["train"]).split("\n")]
    assert decoded == [*lines, ["a"], []]


def test_flushing_in_small_pieces_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"w{i} w{i % 7}\n" for i in range(50))
    whole = tokenise(tmp_path, text, "w1\n", "w2\n")
    monkeypatch.setattr(word_level, "BUFFER", 8)
    assert tokenise(tmp_path, text, "w1\n", "w2\n") == whole


@pytest.mark.parametrize(("words", "dtype"), [(100, "uint8"), (300, "uint16"), (66_000, "int32")])
def test_the_stored_type_is_the_narrowest_that_fits(tmp_path: Path, words: int, dtype: str) -> None:
    train = " ".join(f"w{i}" for i in range(words)) + "\n"
    _, tokens = tokenise(tmp_path, train, "w1\n", "w2\n")
    assert np.load(tmp_path / "train.npy").dtype == dtype
    assert tokens["train"] == [*range(1, words + 1), 0]


def test_wikitext_names_come_first_and_parts_are_read_in_order(tmp_path: Path) -> None:
    for name in ("train_01.txt.xz", "train_00.txt.xz"):
        (tmp_path / name).write_bytes(lzma.compress(name[:8].encode() + b"\n"))
    for name in ("wiki.valid.tokens", "valid.txt", "test.txt"):
        (tmp_path / name).write_text("a\n")
    files = find_word_files(tmp_path)
    assert [path.name for path in files["train"]] == ["train_00.txt.xz", "train_01.txt.xz"]
    assert [path.name for path in files["valid"]] == ["wiki.valid.tokens"]
    vocabulary, _ = write_words(files, tmp_path, PrepareConfig(), silent)
    assert vocabulary.symbols[:3] == ("<eos>", "train_00", "train_01")


def test_a_missing_split_is_named_with_the_names_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"has no valid text; expected wiki\.valid\.tokens or"):
        find_word_files(tmp_path)
    with pytest.raises(UserError, match="no file was given for test, valid"):
        find_word_files({"train": tmp_path / "train.txt"})
    with pytest.raises(UserError, match="is not a folder"):
        find_word_files(tmp_path / "train.txt")


def test_a_corpus_without_a_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"min_count=3: no word of .*train\.txt occurs that often"):
        tokenise(tmp_path, "a a b b\n", "a\n", "a\n", PrepareConfig(min_count=3))
    for blank in ("\n \n", "<unk> <unk>\n"):
        with pytest.raises(UserError, match=r"train\.txt holds no words; give a training text"):
            tokenise(tmp_path, blank, "a\n", "a b\n")


def test_a_split_of_one_token_predicts_nothing_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"valid\.txt holds 1 token; expected two or more"):
        tokenise(tmp_path, "a b\n", "\n", "a\n")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("train.txt", "train_00.txt"), "train.txt and train_00.txt"),
        (("train_00.txt", "train_01.txt.xz"), "train_00.txt and train_01.txt.xz"),
        (("train_00.txt", "train_01.txt"), ""),
        (("train.txt", "train_notes.txt"), ""),
    ],
)
def test_no_part_of_a_text_is_left_out_in_silence(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    for name in (*names, "valid.txt", "test.txt"):
        (tmp_path / name).write_text("a b\n")
    if not said:
        assert len(find_word_files(tmp_path)["train"]) == (2 if "train_01.txt" in names else 1)
        return
    with pytest.raises(UserError, match=f"holds {said} for the train text"):
        find_word_files(tmp_path)
