"""Join the processes that torchrun started."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from acmoe.config.parallel import ParallelConfig
from acmoe.distributed.failure import FailureWatch
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.errors import UserError, check, first_line
from acmoe.runtime import pick_device
from acmoe.storage.shards import leave_writing

TIMEOUT = 600.0  # seconds that a process waits for the others, at the start and in a collective
LAUNCH = "torchrun sets it; unset RANK and WORLD_SIZE to train in one process"
# Tensors of the CPU always go through gloo: messages between hosts need no device.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def launched() -> bool:
    """Return True in a process that torchrun, or another launcher, started as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_processes() -> int:
    """Return the number of processes that the launcher started, or 1 if there was no launcher."""
    return _number("WORLD_SIZE") if launched() else 1


@contextmanager
def joined(parallel: ParallelConfig, device: str) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the processes of the run; yield them, and the device of this process.

    One process without a launcher needs no process group. An error of one process inside `with`
    ends all of them.
    """
    if not launched():
        check(
            parallel.processes == 1,
            f"{parallel} needs {parallel.processes} processes; start them with "
            f"{torchrun(parallel.processes)}",
        )
        yield ALONE, pick_device(device)
        return
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    check(rank < size, f"RANK={rank} must be less than WORLD_SIZE={size}; {LAUNCH}")
    _check_number(parallel, size)
    own = pick_device(_own_device(device, os.environ))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    store = _meet(rank, size)
    watch = FailureWatch(store, rank, size)
    try:
        ranks = _process_group(store, rank, parallel, own)
        yield ranks, own
        ranks.wait()  # rank 0 may hold the store: it must not go first
    except BaseException as raised:
        error = watch.explained(raised)
        watch.report(error)
        if own.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()  # NCCL would wait here for a collective that never ends
        leave_writing(seconds=5.0)
        watch.fail(error)
    watch.close()
    dist.destroy_process_group()


def _check_number(parallel: ParallelConfig, size: int) -> None:
    """Raise if the launcher started another number of processes than the run needs."""
    if size == parallel.processes:
        return
    shares, left = divmod(size, parallel.pipeline)
    raise UserError(
        f"{parallel} needs {parallel.processes} processes, but the launcher started {size}; "
        + (f"start a multiple of {parallel.pipeline}" if left else f"give parallel.data={shares}")
    )


def _number(name: str) -> int:
    """Return a number that the launcher has set in the environment."""
    value = os.environ.get(name, "")
    check(value.isdecimal(), f"{name}={value!r} in the environment is no number; {LAUNCH}")
    return int(value)


def _process_group(store: Any, rank: int, parallel: ParallelConfig, device: torch.device) -> Ranks:
    from torch.distributed.device_mesh import init_device_mesh

    check(device.type in BACKENDS, f"device={device} has no collectives; use cpu or cuda")
    dist.init_process_group(
        BACKENDS[device.type],
        store=store,
        rank=rank,
        world_size=parallel.processes,
        timeout=timedelta(seconds=TIMEOUT),
    )
    mesh = init_device_mesh(
        device.type,
        (parallel.pipeline, parallel.data // parallel.expert, parallel.expert),
        mesh_dim_names=("pipeline", "replicate", "expert"),
    )
    # A recompute in the backward must not come between the buckets of gradients: another group.
    stages = mesh.mesh.flatten(1).tolist()
    statistics, _ = dist.new_subgroups_by_enumeration(stages)  # type: ignore[no-untyped-call]
    return Ranks(
        rank=rank,
        size=parallel.processes,
        mesh=mesh,
        data=mesh["replicate", "expert"]._flatten("data"),
        statistics=statistics,
    )


def _meet(rank: int, size: int) -> Any:
    """Return the store that the processes share, once all of them are there."""
    store = _store(rank)
    store.set(f"rank {rank}", "here")
    deadline = time.monotonic() + TIMEOUT
    missing = list(range(size))
    while missing := [other for other in missing if not store.check([f"rank {other}"])]:
        check(time.monotonic() < deadline, _absent(missing))
        time.sleep(0.05)
    return store


def _store(rank: int) -> Any:
    """Return the store of torchrun, or one that rank 0 holds; it does not wait for the others."""
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = os.environ.get("MASTER_ADDR", "")
    check(bool(address), f"MASTER_ADDR is missing in the environment; {LAUNCH}")
    port = _number("MASTER_PORT")
    try:
        found = TCPStore(
            address,
            port,
            is_master=holds,
            timeout=timedelta(seconds=TIMEOUT),
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        busy = f"rank 0 cannot listen at port {port}: {first_line(error)}; give another MASTER_PORT"
        raise UserError(busy if holds else _absent([0])) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a restart
    return PrefixStore(f"acmoe/{attempt}", found)


def _absent(missing: list[int]) -> str:
    return (
        f"rank {', '.join(map(str, missing))} of {os.environ['WORLD_SIZE']} did not start within "
        f"{TIMEOUT:.0f} s; look at the messages of that process"
    )


def _own_device(device: str, environment: Mapping[str, str]) -> str:
    """Return the GPU with the number of this process on its machine, or the CPU."""
    kind = pick_device(device).type
    return kind if kind in ("cpu", "mps") else f"{kind}:{environment.get('LOCAL_RANK', '0')}"


def torchrun(processes: int) -> str:
    """Return the command that starts this program in so many processes."""
    return f"torchrun --standalone --nproc-per-node {processes} -m acmoe {shlex.join(sys.argv[1:])}"
