"""Stop or kill a training run in the middle of an update."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from acmoe.train.trainer import Trainer


def stop_at(kind: type[Trainer], steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process SIGTERM in the middle of each of these steps, one for each call."""
    update = kind.update

    def interrupted(self: Trainer, step: int, *, record: bool) -> Any:
        result = update(self, step, record=record)
        if steps and step == steps[0]:
            steps.pop(0)
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(kind, "update", interrupted)


@contextmanager
def killed_after(kind: type[Trainer], last: int) -> Iterator[None]:
    """Raise KeyboardInterrupt in place of every update after the step `last`; expect it."""
    update = kind.update

    def killed(self: Trainer, step: int, *, record: bool) -> Any:
        if step > last:
            raise KeyboardInterrupt
        return update(self, step, record=record)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, "update", killed)
        yield
