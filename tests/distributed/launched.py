"""Run functions in processes with the environment that torchrun gives them."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import free_port
from started import start_processes
from torch.distributed import TCPStore


def launch(world: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[Any]:
    """Call `function(rank, *arguments)` in `world` processes; return the results by rank."""
    folder.mkdir(exist_ok=True)
    start_processes(world, _enter, (world, function, arguments, folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def launch_often(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    afresh: bool = False,
) -> list[Any]:
    """Call `function` as `launch` does; it may start the processes often, after `new_start()` each.

    This process holds the store, as torchrun does. A port that was free when the processes were
    launched may be taken when rank 0 of a later start listens there. `afresh`: the processes have
    the environment of this one.
    """
    folder.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (store.port, world, function, arguments, folder)
    start_processes(world, _enter_often, given, afresh=afresh)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def new_start() -> None:
    """Let the processes meet once more in the store of `launch_often`."""
    times = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(times + 1)


def _enter_often(rank: int, port: int, *arguments: Any) -> None:
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(port))
    _enter(rank, *arguments)


def _enter(
    rank: int,
    world: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the library searches the objects of this process, not the million of its imports
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1"
    )
    torch.save(function(rank, *arguments), folder / f"{rank}.pt")


def ending(run: Callable[[], object]) -> str:
    """Call `run` and return how it ended: its exit code, its error, or "went on"."""
    try:
        run()
    except SystemExit as end:
        return f"exit {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def ports(count: int) -> list[int]:
    """Return free ports: each start of the processes in one launch needs one of its own."""
    return [free_port() for _ in range(count)]
