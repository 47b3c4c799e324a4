"""A path is refused before the work if its end could not be written."""

import os
from pathlib import Path

import pytest

from acmoe.errors import UserError
from acmoe.storage.writable import check_can_append, check_can_fill, check_can_write


def test_a_folder_that_can_be_made_is_accepted_and_not_made(tmp_path: Path) -> None:
    check_can_fill(tmp_path)
    check_can_fill(tmp_path / "new" / "deeper")
    check_can_write(tmp_path / "new" / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_may_be_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    check_can_write(page)
    assert page.read_text() == "old"


def test_relative_paths_begin_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_can_fill(Path("new"))
    check_can_write(Path("page.html"))


@pytest.mark.parametrize("inside", ["", "new", "new/deeper"])
def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path, inside: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=rf"cannot write into .*: {file} is no folder; choose"):
        check_can_fill(file / inside)
    page = file / inside / "page.html"
    with pytest.raises(UserError, match=f"^cannot write {page}: {file} is no folder; choose"):
        check_can_write(page)


def test_a_link_to_nothing_is_no_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=f"{link} is no folder"):
        check_can_fill(link)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("."), Path("/")):
        with pytest.raises(UserError, match=f"^{path} is a folder; name a file in it$"):
            check_can_write(path)


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    # The superuser may write anywhere, so that the mode of a folder would not show it.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)
    check_can_fill(tmp_path)
    with pytest.raises(UserError, match=rf"into {locked}/new: no permission in {locked}; choose"):
        check_can_fill(locked / "new")


def test_a_file_in_a_folder_without_permission_takes_more_lines_but_no_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "one.jsonl"
    results.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    check_can_append(results)
    for check, path in ((check_can_write, results), (check_can_append, tmp_path / "two.jsonl")):
        with pytest.raises(UserError, match=f"^cannot write {path}: no permission in {tmp_path};"):
            check(path)


def test_a_file_without_permission_is_replaced_but_takes_no_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "one.jsonl"
    results.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != results)
    check_can_write(results)
    with pytest.raises(UserError, match=f"^cannot write {results}: no permission to read and wri"):
        check_can_append(results)
    with pytest.raises(UserError, match=f"^{tmp_path} is a folder; name a file in it$"):
        check_can_append(tmp_path)


def test_lines_are_added_to_no_link_and_no_pipe(tmp_path: Path) -> None:
    results, link, pipe = (tmp_path / name for name in ("one.jsonl", "link", "pipe"))
    link.symlink_to(results)
    for there in (False, True):  # a link to nothing, then one to a file
        with pytest.raises(UserError, match=f"^{link} is a symbolic link; replace it by a file"):
            check_can_append(link)
        assert results.exists() is there
        results.touch()
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=f"^{pipe} is no regular file; remove it$"):
        check_can_append(pipe)
