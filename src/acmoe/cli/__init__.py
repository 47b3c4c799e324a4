"""The command line. Each command is a dataclass: its fields are the options, `run` does the work.

Exit codes: 0 done; 2 a mistake in the arguments, explained in one line; 1 anything else.
"""

import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import torch

import acmoe
from acmoe.cli.arguments.parse import parse
from acmoe.cli.commands import COMMANDS
from acmoe.cli.streams import drop_output, is_first_of_machine, plain_output
from acmoe.errors import UserError, check, typed_line
from acmoe.starting import raise_on_interrupt
from acmoe.train.freed_memory import keep_freed_memory

SEVERAL = {"train", "evaluate", "doctor"}  # commands that torchrun may start
TO_SPEAK = 10.0  # seconds that the first process of a machine has to report a mistake


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_output()
    try:
        raise_on_interrupt()
        keep_freed_memory()
        with plain_output():
            status = _run(arguments)
            sys.stdout.flush()
    except UserError as mistake:
        _let_first_speak(mistake)
        print(f"acmoe: {mistake}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt as stop:
        print(f"acmoe: interrupted{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the pipe (head, less) has closed it. The rest is dropped, so that the flush
        # at interpreter exit does not fail again.
        drop_output(sys.stdout.fileno())
        status = 0
    except OSError as error:  # a disk or a network, not a mistake in the arguments
        where = f"{error.filename}: " if error.filename else ""
        who = f"rank {os.environ['RANK']}: " if hasattr(error, "reported") else ""
        _let_first_speak(error)
        print(f"acmoe: {who}{where}{error.strerror or error}", file=sys.stderr)
        status = 1
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        _let_first_speak(error)
        print(
            f"acmoe: out of memory; use a smaller model, batch or block ({typed_line(error)})",
            file=sys.stderr,
        )
        status = 1
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """Run the command that the arguments name; return the exit code."""
    if arguments == ["--version"]:
        print(f"acmoe {acmoe.__version__}")
        return 0
    _check_launched(arguments)
    return parse(COMMANDS, arguments).run()


def _lacks_memory(error: MemoryError | RuntimeError) -> bool:
    """Return True if a tensor or array does not fit the device's or the host's memory."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    said = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, kinds) or any(words in str(error) for words in said)


def _open_output() -> None:
    """Let every command print, also where its output is closed (`>&-`) or has no Unicode.

    What is printed to a closed file is lost; what an encoding lacks becomes `?`.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    # Python's choice in the C locale is "surrogateescape", which fails beyond ASCII just as well.
    failing = ("strict", "surrogateescape") if sys.stdout.encoding == "ascii" else ("strict",)
    if sys.stdout.errors in failing:
        sys.stdout.reconfigure(errors="replace")


def _check_launched(arguments: Sequence[str]) -> None:
    """Raise a UserError if torchrun started several processes of a command that needs one."""
    size = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    name = arguments[0] if arguments else ""
    check(
        size in (None, "", "1") or name not in COMMANDS or name in SEVERAL,
        f"`acmoe {name}` runs in one process, and the launcher started {size}; give it without "
        "torchrun",
    )


def _let_first_speak(error: Exception) -> None:
    """Wait while another of torchrun's processes, which make the same mistake, reports it.

    Before they have joined, the first process of each machine speaks, and torchrun then ends the
    others. One that exits earlier, without a word, would have that first one ended before it
    speaks. After they have joined, the one that failed first speaks (distributed/failure.py).
    """
    if not hasattr(error, "reported") and not is_first_of_machine():
        time.sleep(TO_SPEAK)
