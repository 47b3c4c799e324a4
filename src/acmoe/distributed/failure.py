"""Stop all processes of a run when one of them fails.

The first process that fails writes its message into the store of the process group, then raises.
The others learn of it in one of two ways. Their next collective raises, because gloo notices the
closed connection. Or they hang in a collective of NCCL: a thread reads the store, and ends the
process if it has not ended by itself. A process that is killed writes nothing: the first one that
loses its connection says so.

A process whose collective has timed out asks the others, through the store, what they are doing:
the threads answer with the line that their process is in. So the message names who did not come.
"""

import os
import re
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from acmoe.errors import UserError, first_line

KEY = "failure"
QUESTION = "what are you doing"
WAITING = "waits in a collective"
LOST = (
    "lost the connection to another rank, which was killed, or whose machine is gone; look for its "
    "signal in the launcher's report (SIGKILL: often no memory was left), then give the same "
    "command again"
)
_LOST = re.compile("connection (closed|reset) by peer|remote process exited", re.I)
_TIMED_OUT = re.compile("timed? ?out", re.I)
LOOK_EVERY = 1.0  # seconds between two looks of the thread
PATIENCE = 20.0  # seconds that a process has to end by itself after another has failed


class FailureWatch:
    """Reports a failure of this process to the others, and ends this one when another fails."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size, self.first = store, rank, size, True
        self._watched = threading.get_ident()
        self._answered = False
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
            error = type(error)(f"rank {self.rank}: {error}").with_traceback(error.__traceback__)
        elif isinstance(error, Exception) and not isinstance(error, UserError):
            error.add_note(f"rank {self.rank} of {self.size} raised this, and ends all others")
        error.reported = True  # type: ignore[attr-defined]
        raise error

    def explained(self, error: BaseException) -> BaseException:
        """Return an error that tells which processes are missing if a collective failed for that.

        Any other error is returned as it is. After a timeout it takes three seconds, in which the
        others answer.
        """
        text = str(error) if isinstance(error, RuntimeError) else ""
        message = None
        if _LOST.search(text):
            message = LOST
        elif _TIMED_OUT.search(text):
            message = self._named_missing()
        if message is None:
            return error
        found = UserError(message)
        found.__cause__ = error
        return found

    def _named_missing(self) -> str | None:
        """Return a message that names the processes which did not come, if they can be asked."""
        try:
            places = self._ask()
        except RuntimeError:  # the process that holds the store is gone
            return None
        missing = {rank: place for rank, place in places.items() if place != WAITING}
        named = "; ".join(f"rank {rank} {place}" for rank, place in missing.items())
        return (
            f"gives up waiting in a collective: {named or 'all other ranks wait, too'}; look at "
            "the messages and the load of that process, then give the same command again"
        )

    def _ask(self) -> dict[int, str]:
        """Return what each other process is doing, by rank."""
        self.store.set(QUESTION, "")
        time.sleep(3 * LOOK_EVERY)
        others = [rank for rank in range(self.size) if rank != self.rank]
        return {
            rank: self.store.get(_answer(rank)).decode()
            if self.store.check([_answer(rank)])
            else "does not answer: it was stopped, or its machine is gone"
            for rank in others
        }

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            try:
                failed = self.store.check([KEY])
                if not self._answered and self.store.check([QUESTION]):
                    self.store.set(_answer(self.rank), _doing(self._watched))
                    self._answered = True
            except RuntimeError:  # the process that holds the store is gone
                failed = True
            if failed and not self._ended.wait(PATIENCE):
                print(f"acmoe: rank {self.rank} ends: another has failed", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)


def _answer(rank: int) -> str:
    """Return the name by which the store has the answer of a process."""
    return f"rank {rank} is doing"


def _doing(thread: int) -> str:
    """Return what a thread of this process is doing: WAITING, or the line of Python it is in."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    if re.search(r"torch.distributed", stack[-1].filename):
        return WAITING
    own = [frame for frame in stack if not re.search(r"site-packages.torch\b", frame.filename)]
    frame = (own or stack)[-1]
    return f"is at {os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}"
