"""The command line. Each command is a dataclass: its fields are the options, `run` does the work.

Exit codes: 0 done; 2 a mistake in the arguments, explained in one line; 1 anything else.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import acmoe
from acmoe.cli.commands import COMMANDS
from acmoe.cli.parse import parse
from acmoe.errors import UserError


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"acmoe {acmoe.__version__}")
        sys.exit(0)
    try:
        command = parse(COMMANDS, arguments)
        status = command.run()
        sys.stdout.flush()
    except UserError as mistake:
        print(f"acmoe: {mistake}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt as stop:
        print(f"acmoe: interrupted{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the pipe (head, less) has closed it. Send the rest to /dev/null, so that the
        # flush at interpreter exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:  # a disk or a network, not a mistake in the arguments
        where = f"{error.filename}: " if error.filename else ""
        print(f"acmoe: {where}{error.strerror or error}", file=sys.stderr)
        status = 1
    sys.exit(status)
