"""A log keeps every record that was written whole, and notices every changed bit."""

import json
import os
from pathlib import Path

import pytest

from acmoe.errors import UserError
from acmoe.storage.lines import append_line, line_of, parse_lines, read_lines

RECORDS = [{"kind": "train", "step": step, "loss": 1.5 / step} for step in (1, 2, 3)]
CONTENT = b"".join(map(line_of, RECORDS))


def test_the_checksum_of_a_line_is_that_of_the_record_as_json() -> None:
    body = b'{"step": 1}'  # CRC-32 bit by bit, with the polynomial of zlib
    crc = 0xFFFFFFFF
    for byte in body:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    assert line_of({"step": 1}) == b'{"step": 1, "crc32": "%08x"}\n' % (crc ^ 0xFFFFFFFF)


def test_every_flipped_bit_is_noticed() -> None:
    for position in range(len(CONTENT)):
        for bit in range(8):
            damaged = bytearray(CONTENT)
            damaged[position] ^= 1 << bit
            lines = parse_lines(bytes(damaged))
            assert lines.damaged or lines.cut_off, (position, bit)
            assert all(record in RECORDS for record in lines.records)
            assert len(lines.records) >= 1


def test_a_damaged_line_costs_only_itself() -> None:
    first, second, third = CONTENT.splitlines(keepends=True)
    lines = parse_lines(first + b"\xff" + second[1:] + third)
    assert (lines.records, lines.damaged) == ([RECORDS[0], RECORDS[2]], [2])
    complaint = lines.complaint(Path("metrics.jsonl"))
    assert complaint is not None and "1 damaged (line 2)" in complaint


def test_lines_of_version_0_1_are_read_before_the_first_checksum_only() -> None:
    old = b'{"kind": "train", "step": 1}\n'
    assert parse_lines(old + CONTENT).records[0] == {"kind": "train", "step": 1}
    assert parse_lines(CONTENT + old).damaged == [4]
    assert parse_lines(b"null\n[1]\n" + old).damaged == [1, 2]  # JSON, but no records


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(CONTENT[:-3])
    lines = read_lines(file)
    assert (lines.records, lines.cut_off) == (RECORDS[:2], True)
    assert lines.size == CONTENT.index(b'{"kind": "train", "step": 3')


@pytest.mark.parametrize("room", [0, 1, 20])
def test_a_full_disk_leaves_no_part_of_a_line(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log.jsonl"
    append_line(file, RECORDS[0])
    left = [room]
    real = os.write

    def write(handle: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        taken = real(handle, data[: left[0]])
        left[0] -= taken
        return taken

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        with pytest.raises(UserError, match=r"log.jsonl: No space left on device; make room"):
            append_line(file, RECORDS[1])
    append_line(file, RECORDS[2])
    assert read_lines(file).records == [RECORDS[0], RECORDS[2]]


def test_a_number_that_json_lacks_becomes_null() -> None:
    text = line_of({"loss": float("nan"), "list": [float("inf"), 1.0]})
    assert json.loads(text)["loss"] is None and json.loads(text)["list"] == [None, 1.0]
