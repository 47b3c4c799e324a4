"""Run a function in several processes of one gloo group, and collect what each returns."""

import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from started import start_processes


def in_ranks(world: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[Any]:
    """Call `function(rank, *arguments)` in `world` processes; return the results by rank.

    The function must be importable: defined at the top of a module.
    """
    port = free_port()
    start_processes(world, _enter, (world, port, function, arguments, folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _enter(
    rank: int,
    world: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the library searches the objects of this process, not the million of its imports
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        torch.save(function(rank, *arguments), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
