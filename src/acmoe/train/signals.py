"""SIGINT, SIGTERM and SIGHUP as a request to stop after the current step."""

import signal
import threading
from types import FrameType
from typing import Any, Self

STOP = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class StopSignals:
    """Remembers the first stop signal inside `with`; a second one acts at once.

    SIGHUP comes when a terminal closes; Windows has none. A signal that is ignored stays ignored:
    `nohup` has a run outlive its terminal so. Where `listens` is False, no handler is installed:
    another thread sets `received`.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.listens = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only the main thread handle signals; in other threads nothing changes.
        if self.listens and threading.current_thread() is threading.main_thread():
            for number in STOP:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *raised: object) -> None:
        self._restore()
