"""SIGINT and SIGTERM as a request to stop after the current step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Inside `with`, remembers the first such signal; a second one is obeyed at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Only the main thread may handle signals; elsewhere they are its business.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._restore()
