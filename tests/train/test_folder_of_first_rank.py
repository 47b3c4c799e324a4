"""The run folder is the business of the first process: other machines may not have it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from acmoe import UserError
from acmoe.train import run


class DataReachedError(Exception):
    pass


def reach(*_: object) -> None:
    raise DataReachedError


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_process_refuses_a_folder_of_somebody_else(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    monkeypatch.setattr(run, "checked_corpus", reach)
    ranks: Any = SimpleNamespace(first=first, first_before_others=nullcontext)
    unused: Any = None
    with pytest.raises(UserError if first else DataReachedError):
        run._train_text(unused, tmp_path, unused, unused, ranks, unused)
