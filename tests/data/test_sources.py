"""Source files are read whole, or refused in one line that says where they are broken."""

import gzip
import hashlib
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from acmoe.data import sources
from acmoe.data.sources import describe_source, find_file, read_chunks, read_lines
from acmoe.errors import UserError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
}


def write(folder: Path, data: bytes, suffix: str = "") -> Path:
    path = folder / f"text{suffix}"
    path.write_bytes(PACK[suffix](data))
    return path


@pytest.mark.parametrize("suffix", PACK)
def test_plain_and_compressed_files_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    data = bytes(range(256)) * 40
    path = write(tmp_path, data, suffix)
    assert b"".join(read_chunks(path, size=1000)) == data
    assert max(len(chunk) for chunk in read_chunks(path, size=1000)) <= 1000


@pytest.mark.parametrize("suffix", PACK)
def test_progress_is_told_in_bytes_on_disk_and_ends_at_the_file_size(
    tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path, b"line\n" * 5000, suffix)
    told: list[tuple[int, int]] = []
    list(read_chunks(path, lambda done, total: told.append((done, total))))
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


def test_lines_are_numbered_from_one_and_a_missing_last_newline_is_no_error(tmp_path: Path) -> None:
    path = write(tmp_path, "a b\n\nç\x85d\r\nlast".encode())
    assert list(read_lines(path)) == [(1, "a b"), (2, ""), (3, "ç\x85d\r"), (4, "last")]


def test_lines_do_not_depend_on_where_the_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "é\nüber\n\nx\n".encode())
    whole = list(read_lines(path))
    real = sources.read_chunks
    monkeypatch.setattr(sources, "read_chunks", lambda p, report: real(p, report, size=1))
    assert list(read_lines(path)) == whole == [(1, "é"), (2, "über"), (3, ""), (4, "x")]


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    assert list(read_lines(write(tmp_path, b"\xef\xbb\xbfsentence\n"))) == [(1, "sentence")]


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_a_truncated_file_is_named_with_the_bytes_that_were_readable(
    tmp_path: Path, suffix: str
) -> None:
    text = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(200))
    path = write(tmp_path, text, suffix)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"text\{suffix} is truncated: .* ends after [\d,]+ bytes"):
        list(read_chunks(path))


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_a_corrupt_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, bytes(range(256)) * 20, suffix)
    data = bytearray(path.read_bytes())
    data[-6] ^= 0xFF  # inside the checksum at the end of both formats
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=rf"text\{suffix} is corrupt after"):
        list(read_chunks(path))


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_a_plain_file_with_a_compressed_name_is_corrupt(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(b"plain words, no compression at all")
    with pytest.raises(UserError, match="is corrupt after 0 bytes of text"):
        list(read_chunks(path))


@pytest.mark.parametrize("suffix", PACK)
def test_an_empty_text_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UserError, match=rf"text{suffix} is empty; give a file of text"):
        list(read_chunks(write(tmp_path, b"", suffix)))


def test_a_byte_that_is_not_utf8_is_named_by_line_and_place(tmp_path: Path) -> None:
    path = write(tmp_path, b"fine\nal\xffso\n")
    with pytest.raises(UserError, match=r"line 2, byte 3 \(0xff\) is not UTF-8"):
        list(read_lines(path))


def test_a_line_too_long_to_stream_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE", 10)
    path = write(tmp_path, b"short\n" + b"x" * 11)
    with pytest.raises(UserError, match="line 2 is longer than 10 bytes"):
        list(read_lines(path))


def test_a_missing_file_and_a_folder_are_no_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        list(read_chunks(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        list(read_chunks(tmp_path))
    with pytest.raises(UserError, match="is not a file"):
        describe_source("train", tmp_path)


def test_a_source_is_recorded_by_name_size_and_checksum_as_it_lies_on_disk(tmp_path: Path) -> None:
    path = write(tmp_path, b"abc", ".gz")
    record = describe_source("train", path)
    assert (record.split, record.file, record.bytes) == ("train", "text.gz", path.stat().st_size)
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_plain_file_is_preferred_to_its_compressed_copy(tmp_path: Path) -> None:
    xz = write(tmp_path, b"x", ".xz")
    assert find_file(tmp_path, ("other", "text")) == xz
    plain = write(tmp_path, b"x")
    assert find_file(tmp_path, ("other", "text")) == plain
    assert find_file(tmp_path, ("other",)) is None
