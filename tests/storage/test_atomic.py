"""Files are flushed to disk by the rules of the system, POSIX or Windows."""

import errno
import os
import stat
from pathlib import Path

import pytest

from acmoe.errors import UserError
from acmoe.storage import atomic

fcntl = pytest.importorskip("fcntl")


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What every call of fsync flushed, and whether its descriptor may write (os.O_ACCMODE)."""
    found: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if atomic._ON_WINDOWS and mode == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")  # as FlushFileBuffers refuses it
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        found.append(("folder" if folder else "file", mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `os.open` refuse folders, and `flushed` refuse descriptors that may not write."""
    real = os.open

    def refuse_folders(path: Path, flags: int, *rest: int) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(atomic, "_ON_WINDOWS", True)
    monkeypatch.setattr(os, "open", refuse_folders)


def test_on_posix_a_replaced_file_and_its_folder_are_flushed(
    tmp_path: Path, flushed: list[tuple[str, int]]
) -> None:
    atomic.replace_text(tmp_path / "config.json", "{}")
    assert flushed == [("file", os.O_RDONLY), ("folder", os.O_RDONLY)]


def test_on_posix_a_file_that_nobody_may_write_is_flushed(
    tmp_path: Path, flushed: list[tuple[str, int]]
) -> None:
    file = tmp_path / "weights"
    file.write_text("1")
    file.chmod(0o400)
    atomic.sync(file)
    assert flushed == [("file", os.O_RDONLY)]


def test_on_windows_a_replaced_file_is_flushed_and_its_folder_is_not_opened(
    tmp_path: Path, flushed: list[tuple[str, int]], on_windows: None
) -> None:
    file = tmp_path / "config.json"
    file.write_text("old")
    atomic.replace_text(file, "new")
    assert file.read_text() == "new"
    assert flushed == [("file", os.O_RDWR)]


@pytest.mark.parametrize("path", [".", "/", ""])
def test_a_path_that_is_no_name_of_a_file_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(UserError, match=r"^cannot write [./]: it is a folder; name a file in it$"):
        atomic.replace_text(Path(path), "{}")
