"""A sealed document shows every change."""

import json
from pathlib import Path

import pytest

from acmoe.errors import UserError
from acmoe.storage.sealed import read_sealed, write_sealed

DOCUMENT = {"acmoe": "0.2.0", "model": {"dim": 16, "rates": [0.1, 1e-8], "name": "é"}, "best": None}


def test_a_document_is_read_back(tmp_path: Path) -> None:
    write_sealed(tmp_path / "a.json", DOCUMENT)
    assert read_sealed(tmp_path / "a.json", fix="") == {**DOCUMENT, "format": 2}


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_refused_or_changes_nothing(bits: int, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_sealed(file, DOCUMENT)
    content = file.read_bytes()
    for position in range(len(content)):
        for bit in range(position % 8, position % 8 + bits):  # one of each byte, or all
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit % 8
            file.write_bytes(damaged)
            try:
                found = read_sealed(file, fix="")
            except UserError as error:
                assert "a.json" in str(error) and "\n" not in str(error)
            else:  # white space between two fields
                assert found == {**DOCUMENT, "format": 2}, (position, bit)


def test_a_document_of_version_0_1_has_no_seal(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"format": 1, "step": 3}))
    assert read_sealed(tmp_path / "a.json", fix="")["step"] == 3


def test_nan_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        write_sealed(tmp_path / "a.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())
