"""Run functions in processes with the environment that torchrun gives them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from ranks import free_port


def launch(world: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[Any]:
    """Call `function(rank, *arguments)` in `world` processes; return the results by rank."""
    folder.mkdir(exist_ok=True)
    mp.spawn(_enter, (world, function, arguments, folder), nprocs=world, join=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _enter(
    rank: int,
    world: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1"
    )
    torch.save(function(rank, *arguments), folder / f"{rank}.pt")


def ports(count: int) -> list[int]:
    """Return free ports: each start of the processes in one launch needs one of its own."""
    return [free_port() for _ in range(count)]
