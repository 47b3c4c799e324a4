"""Byte-level corpora follow EnWik-8's split and lose nothing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.data.progress import silent
from acmoe.data.text.byte_level import file_bytes, find_byte_file, proportional, write_bytes
from acmoe.errors import UserError


def test_the_split_of_enwik8_is_ninety_five_and_five_million() -> None:
    split = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
    assert proportional(100_000_000) == split
    # 47 bytes: floor(42.3) and floor(2.35), the rest is for testing.
    assert proportional(47) == {"train": 42, "valid": 2, "test": 3}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.binary(min_size=40, max_size=300), st.booleans())
def test_the_splits_decoded_one_after_the_other_are_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, all_values: bool
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    chunks = [data[:7], data[7:]]
    vocabulary, counts = write_bytes(chunks, folder, lengths=proportional, all_values=all_values)
    assert vocabulary.size == (256 if all_values else len(set(data)))
    assert counts == proportional(len(data))
    arrays = [np.load(folder / f"{split}.npy") for split in ("train", "valid", "test")]
    assert [len(array) for array in arrays] == list(counts.values())
    assert vocabulary.decode_bytes(np.concatenate(arrays)) == data
    assert not (folder / "text.raw").exists()


def test_tokens_are_one_byte_wide(tmp_path: Path) -> None:
    write_bytes([bytes(range(256))], tmp_path, lengths=proportional, all_values=True)
    assert np.load(tmp_path / "train.npy").dtype == np.uint8


def test_a_text_too_short_for_three_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the valid split holds 1 bytes; expected two or more"):
        write_bytes([b"x" * 39], tmp_path, lengths=proportional, all_values=True)


@pytest.mark.parametrize("limit", [40, 1000, 5000, None])
def test_a_limit_takes_exactly_the_first_bytes(tmp_path: Path, limit: int | None) -> None:
    data = bytes(i % 251 for i in range(3000))
    (tmp_path / "text").write_bytes(data)
    assert b"".join(file_bytes(tmp_path / "text", limit, silent)) == data[:limit]


def test_a_folder_stands_for_its_enwik8_or_its_only_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds 0 files"):
        find_byte_file(tmp_path)
    (tmp_path / "mine").write_bytes(b"x")
    assert find_byte_file(tmp_path) == find_byte_file(tmp_path / "mine") == tmp_path / "mine"
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(UserError, match="holds 2 files, none of them called enwik8"):
        find_byte_file(tmp_path)
    (tmp_path / "enwik8.xz").write_bytes(b"x")
    assert find_byte_file(tmp_path).name == "enwik8.xz"
    with pytest.raises(UserError, match="does not exist"):
        find_byte_file(tmp_path / "absent")
