"""Ctrl-C while a command still imports torch ends it at once, in one line.

`acmoe` and `python -m acmoe` import the package, and with it torch, before `acmoe.cli.main` runs. A
KeyboardInterrupt in these seconds would print a traceback through torch's modules, or be swallowed
by one of them. So `acmoe/__init__.py` imports this module first. In a process that was started as a
command, it handles SIGINT until `main` takes over; in all other processes it does nothing.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn


def raise_on_interrupt() -> None:
    """Let ctrl-C raise KeyboardInterrupt again, for commands that say what they have saved."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the process. Nothing has been opened or printed yet, so there is nothing to clean up."""
    os.write(2, b"acmoe: interrupted\n")
    os._exit(128 + number)


def _is_command() -> bool:
    """Return True where Python was started with the script `acmoe`, or with `-m acmoe`.

    A process of multiprocessing has the `sys.argv` of its parent, but was started otherwise; and a
    program may have taken its own arguments out of `sys.argv`, whose last may be called acmoe.
    """
    if not sys.argv:
        return False
    started = sys.orig_argv[-len(sys.argv) :]  # without the options of Python itself
    script = os.path.basename(started[0])  # pathlib would have to be imported
    return os.path.splitext(script)[0] == "acmoe" and sys.argv[0] in ("-m", started[0])


if (
    _is_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may ignore it
):
    signal.signal(signal.SIGINT, _end)
