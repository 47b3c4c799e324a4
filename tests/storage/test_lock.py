"""One process at a time holds a lock, and a lock never writes through a link."""

import os
from pathlib import Path

import pytest

from acmoe.errors import UserError
from acmoe.storage.lock import locked


def test_a_lock_holds_the_process_id_and_keeps_others_out(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", in_use="in use by {owner}"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with (
            pytest.raises(UserError, match=f"in use by {os.getpid()}"),
            locked(tmp_path / "lock", in_use="in use by {owner}"),
        ):
            pass
    with locked(tmp_path / "lock", in_use=""):
        pass


def test_a_link_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with (
        pytest.raises(UserError, match="lock is a symbolic link"),
        locked(tmp_path / "lock", in_use=""),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "keep me"


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UserError, match="no regular file"), locked(tmp_path / "lock", in_use=""):
        pass
