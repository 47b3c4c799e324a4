"""Text becomes token ids and comes back."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.data.text.vocabulary import (
    ByteVocabulary,
    WordVocabulary,
    load_vocabulary,
    save_vocabulary,
)
from acmoe.errors import UserError

WORDS = WordVocabulary(("<eos>", "the", "<unk>", "Lobster", "lobster", "@-@"))
ALL_BYTES = ByteVocabulary(bytes(range(256)))

few = settings(max_examples=50, deadline=None, derandomize=True)


@few
@given(st.binary(max_size=200))
def test_all_256_byte_values_round_trip_any_data(data: bytes) -> None:
    assert ALL_BYTES.decode_bytes(ALL_BYTES.encode_bytes(data)) == data


@few
@given(st.text(max_size=100))
def test_all_256_byte_values_round_trip_any_text(text: str) -> None:
    assert ALL_BYTES.decode(ALL_BYTES.encode(text)) == text


@few
@given(st.sets(st.integers(0, 255), min_size=1), st.data())
def test_a_smaller_byte_vocabulary_round_trips_its_own_values(
    values: set[int], data: st.DataObject
) -> None:
    vocabulary = ByteVocabulary(bytes(sorted(values)))
    text = bytes(data.draw(st.lists(st.sampled_from(sorted(values)))))
    tokens = vocabulary.encode_bytes(text)
    assert set(tokens.tolist()) <= set(range(vocabulary.size))
    assert vocabulary.decode_bytes(tokens) == text


@few
@given(st.lists(st.integers(0, WORDS.size - 1)))
def test_word_tokens_survive_decoding_and_encoding(tokens: list[int]) -> None:
    assert WORDS.encode(WORDS.decode(tokens)).tolist() == tokens


def test_words_are_split_at_whitespace_with_case_kept_and_newlines_as_eos() -> None:
    # the=1, Lobster=3, lobster=4, "shell" unknown=2, newline=0
    tokens = WORDS.encode("the Lobster\tlobster  shell\n\n@-@ ")
    assert tokens.tolist() == [1, 3, 4, 2, 0, 0, 5]
    assert WORDS.decode(tokens) == "the Lobster lobster <unk> \n \n @-@"


def test_a_byte_outside_the_vocabulary_is_read_as_a_question_mark() -> None:
    vocabulary = ByteVocabulary(b"\n?ab")
    assert vocabulary.encode("a~b\n").tolist() == [2, 1, 3, 0]
    with pytest.raises(UserError, match="byte 0x7e is not among the 2 values"):
        ByteVocabulary(b"ab").encode("a~b")


def test_the_end_of_line_is_token_zero_for_words_and_the_newline_for_bytes() -> None:
    assert WORDS.eos_id == 0
    assert ByteVocabulary(b"\t\na").eos_id == 1
    assert ByteVocabulary(b"ab").eos_id is None


def test_an_incomplete_character_is_shown_not_raised() -> None:
    assert ALL_BYTES.decode("é".encode()[:1]) == "�"


@pytest.mark.parametrize("vocabulary", [WORDS, ALL_BYTES])
@pytest.mark.parametrize("token", [-1, 300])
def test_a_token_outside_the_vocabulary_is_named(
    vocabulary: WordVocabulary | ByteVocabulary, token: int
) -> None:
    with pytest.raises(UserError, match=f"token {token} is outside the vocabulary of"):
        vocabulary.decode(np.array([0, token]))


@pytest.mark.parametrize("vocabulary", [WORDS, ALL_BYTES, ByteVocabulary(b"\nab")])
def test_a_saved_vocabulary_is_the_same_after_loading(
    tmp_path: Path, vocabulary: WordVocabulary | ByteVocabulary
) -> None:
    save_vocabulary(vocabulary, tmp_path / "v.json")
    assert load_vocabulary(tmp_path / "v.json") == vocabulary


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no vocabulary"),
        ("[]", "is no vocabulary"),
        ('{"kind": "words"}', "is no vocabulary .'symbols'"),
        ('{"kind": "words", "symbols": ["a", "<unk>"]}', "first word of a vocabulary must be <eos"),
        ('{"kind": "words", "symbols": ["<eos>", "a"]}', "must hold <unk>"),
        ('{"kind": "words", "symbols": ["<eos>", "<unk>", "a", "a"]}', "holds .a. twice"),
        ('{"kind": "bytes", "symbols": [3, 2]}', "ascending"),
        ('{"kind": "bytes", "symbols": [256]}', "is no vocabulary"),
        ('{"kind": "letters", "symbols": []}', "kind .letters. is neither words nor bytes"),
    ],
)
def test_a_damaged_vocabulary_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "v.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_vocabulary(path)


def test_a_missing_vocabulary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*absent\.json: No such file"):
        load_vocabulary(tmp_path / "absent.json")


def test_the_vocabulary_file_is_readable_json(tmp_path: Path) -> None:
    save_vocabulary(WORDS, tmp_path / "v.json")
    data = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert data == {"kind": "words", "symbols": list(WORDS.symbols)}
