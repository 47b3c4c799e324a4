"""Start the processes of a test."""

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import torch.multiprocessing as mp

# A server imports these once, and each process is a fork of it. An import of torch and of the
# library takes longer than most tests. `acmoe.lab` is not among them: test_old_spellings.py needs a
# process without it.
IMPORTED_ONCE = [
    "pytest",
    "torch._dynamo.aot_compile",  # by the first step of an optimizer
    "torch._dynamo.polyfills.loader",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "acmoe",
    "acmoe.train.run",
]
METHOD = "spawn" if sys.platform == "win32" else "forkserver"


def fork_server() -> BaseContext:
    """Return the way to start processes that have torch and the library imported."""
    if METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    return multiprocessing.get_context(METHOD)


def start_processes(
    world: int, function: Callable[..., Any], arguments: tuple[Any, ...], *, afresh: bool = False
) -> None:
    """Call `function(rank, *arguments)` in `world` processes, and wait for their end.

    The processes have the environment of the first start, unless they are started `afresh`.
    """
    fork_server()
    mp.start_processes(
        function, arguments, nprocs=world, start_method="spawn" if afresh else METHOD
    )
