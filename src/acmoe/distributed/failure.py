"""Stop all processes of a run when one of them fails.

The first process that fails writes its message into the store of the process group, then raises.
The others learn of it in one of two ways. Their next collective raises, because gloo notices the
closed connection. Or they hang in a collective of NCCL: a thread reads the store, and ends the
process if it has not ended by itself.
"""

import os
import sys
import threading
from typing import Any, NoReturn

from acmoe.errors import UserError, first_line

KEY = "failure"
LOOK_EVERY = 1.0  # seconds between two looks of the thread
PATIENCE = 20.0  # seconds that a process has to end by itself after another has failed


class FailureWatch:
    """Reports a failure of this process to the others, and ends this one when another fails."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.first = store, rank, True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failure-watch", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell the other processes, before a closed connection does."""
        own = f"rank {self.rank}: {first_line(error)}"
        try:
            self.first = self.store.compare_set(KEY, "", own).decode() == own
        except RuntimeError:  # the process that holds the store is gone
            self.first = True

    def fail(self, error: BaseException) -> NoReturn:
        """Raise the error if no process failed before; otherwise exit with 1, without a word.

        So the user reads one message, that of the process where the trouble began.
        """
        self.close()
        if not self.first:
            raise SystemExit(1) from error
        if isinstance(error, UserError) and not getattr(error, "of_all_ranks", False):
            raise type(error)(f"rank {self.rank}: {error}") from error
        raise error

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            try:
                failed = self.store.check([KEY])
            except RuntimeError:  # the process that holds the store is gone
                failed = True
            if failed and not self._ended.wait(PATIENCE):
                print(f"acmoe: rank {self.rank} ends: another has failed", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)
