"""Checkpoints written by all processes: any number of processes continues them.

test_ranks_training.py has the case that runs by default.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import half_of
from launched import ending, launch_often, new_start
from test_torchrun import command, workers
from test_torchrun import start as start_command
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import acmoe
from acmoe.distributed import start
from acmoe.evaluate.run import checkpoints
from acmoe.train.run import train
from tiny_runs import QUIET, byte_corpus, records, tiny_run

pytestmark = pytest.mark.slow

SHORT = (
    *("steps=6", "log_every=1", "eval_every=3", "checkpoint_every=3", "keep=3", "batch=8"),
    *("clip=1.0", "model.dropout=0"),
)
# Runs by the layout that saves them, and the layouts that continue them from step 3.
FSDP = ("parallel.shard=fsdp", "parallel.save=sharded")
EXPERT = ("parallel.expert=2", "parallel.save=async")
PIPELINE = ("parallel.pipeline=2", "parallel.save=sharded")
LAYOUTS = {
    1: (("parallel.save=sharded",),),
    2: (FSDP, ("parallel.save=async",), EXPERT, PIPELINE),
    4: ((*FSDP, "parallel.expert=2"),),
}


def name_of(world: int, settings: tuple[str, ...]) -> str:
    return f"{world} " + " ".join(setting.partition("=")[2] for setting in settings)


ALL = [(world, settings) for world, found in LAYOUTS.items() for settings in found]


def save_all(rank: int, world: int, folder: Path, router: str) -> None:
    """Train a run in each layout of `world` processes."""
    for settings in LAYOUTS[world]:
        run(folder, folder / name_of(world, settings), world, settings, router)


def continue_all(rank: int, world: int, folder: Path, router: str) -> None:
    """Continue every run from step 3 in each layout of `world` processes."""
    for settings in LAYOUTS[world]:
        for before in ALL:
            copy = folder / f"{name_of(*before)} then {name_of(world, settings)}"
            if rank == 0:
                half_of(folder / name_of(*before), copy)
            run(folder, copy, world, settings, router)


def run(
    folder: Path,
    out: Path,
    world: int,
    settings: tuple[str, ...],
    router: str = "adaptive",
) -> None:
    start.TIMEOUT = 60.0
    new_start()
    # Statistics and the balance loss are those of a micro-batch: only the plain router without
    # such a loss may change their number.
    split = "split=1" if router == "smoe" and world == 4 else "split=2"
    adaptive = router == "adaptive"
    group = ("model.router.statistics_group=global",) if adaptive else ("model.balance=0",)
    data = world // 2 if settings == PIPELINE else world
    own = (split, *group, f"parallel.data={data}", *settings)
    config = tiny_run(folder / "corpus", *SHORT, *own, router=router)
    train(config, out, console=QUIET)


def in_processes(world: int, function: Any, folder: Path, router: str = "adaptive") -> None:
    if world == 1:
        function(0, 1, folder, router)
    else:
        launch_often(world, function, world, folder, router, folder=folder / f"results-{world}")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


@pytest.mark.parametrize("router", ["adaptive", "smoe"])
def test_any_layout_continues_any_other(router: str, tmp_path: Path) -> None:
    byte_corpus(tmp_path)
    run(tmp_path, tmp_path / "whole", 1, ("parallel.save=whole",), router)
    for world in LAYOUTS:
        in_processes(world, save_all, tmp_path, router)
    for world in LAYOUTS:
        in_processes(world, continue_all, tmp_path, router)
    expected = losses(tmp_path / "whole")
    for before in ALL:
        assert losses(tmp_path / name_of(*before)) == pytest.approx(expected, abs=1e-5)
        for after in ALL:
            found = losses(tmp_path / f"{name_of(*before)} then {name_of(*after)}")
            assert found == pytest.approx(expected, abs=1e-5), (before, after)
            if before == after:  # on the same layout it goes on bit by bit
                assert found == losses(tmp_path / name_of(*before))


def test_the_model_of_parts_is_bitwise_the_gathered_one(tmp_path: Path) -> None:
    """The same two processes save step 6 in both ways."""
    byte_corpus(tmp_path)
    launch_often(2, both_ways, tmp_path, folder=tmp_path / "results")
    for step in ("step-00000003", "step-00000006"):
        found, expected = (
            acmoe.load(tmp_path / name / "checkpoints" / step).state_dict()
            for name in ("sharded", "whole")
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def both_ways(rank: int, folder: Path) -> None:
    for how in ("sharded", "whole"):
        settings = ("parallel.shard=fsdp", f"parallel.save={how}")
        run(folder, folder / how, 2, settings)


def test_a_full_disk_of_one_process_ends_all_in_one_line(tmp_path: Path) -> None:
    byte_corpus(tmp_path)
    first, second = sorted(launch_often(2, full_disk, tmp_path, folder=tmp_path / "results"))
    assert re.fullmatch(
        r"UserError: rank 1: cannot write .*/shards: No space left on device; make room .*", first
    )
    assert second == "exit 1"
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "step-00000003",
        "step-00000006",
    ]


def full_disk(rank: int, folder: Path) -> str:
    """Fail in the first save of rank 1, then give the same command again."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HuggingFaceStorageWriter, "write_data", no_space)
        said = ending(lambda: run(folder, folder / "run", 2, FSDP))
    assert not (folder / "run" / "checkpoints" / ".partial").exists()
    run(folder, folder / "run", 2, FSDP)
    return said


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["sharded", "async"])
def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path, how: str
) -> None:
    """torchrun starts both again; they end with the losses of an undisturbed run."""
    corpus = byte_corpus(tmp_path)
    settings = ("steps=40", "eval_every=40", "checkpoint_every=2", "keep=2")
    layout = ("parallel.shard=fsdp", f"parallel.save={how}")
    whole = start_command(*command(2, corpus, tmp_path / "whole", *settings, *layout))
    said, _ = whole.communicate(timeout=180)
    assert whole.returncode == 0, said
    killed = start_command(*command(2, corpus, tmp_path / "run", *settings, *layout, restarts=3))
    written = tmp_path / "run" / "checkpoints"
    while not (checkpoints(written) and list(written.glob(".partial/shards/*"))):
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.001)
    os.kill(dict(workers(killed.pid))[1], signal.SIGKILL)
    said, _ = killed.communicate(timeout=240)
    assert killed.returncode == 0, said
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not list(written.glob(".*"))
