"""torchrun itself starts `acmoe train`; signals, NaN, a killed process, four processes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acmoe.evaluate.run import checkpoints
from tiny_runs import byte_corpus, records

pytestmark = pytest.mark.slow

# A recipe with the sizes of `tiny_run`, as the command line has no other way to ask for them.
SMALL = [
    "model.dim=16",
    "model.heads=2",
    "model.hidden=16",
    "model.repeats=3",
    "model.span=24",
    "model.block=16",
    "model.num_experts=4",
    "model.dropout=0",
    "model.router.statistics_group=global",
    "data.name=bytes",
    "batch=8",
    "warmup=5",
    "lr=1e-2",
    "eval_batch=2",
    "eval_tokens=200",
    "device=cpu",
    "log_every=1",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_corpus(tmp_path_factory.mktemp("corpus"))


def command(world: int, corpus: Path, out: Path, *settings: str, restarts: int = 0) -> list[str]:
    """Return the command of a small run; later settings replace earlier ones of the same name."""
    named = dict(pair.split("=") for pair in (*SMALL, *settings))
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(world), "--max-restarts", str(restarts)),
        *("-m", "acmoe", "train", "--out", str(out), "switch-nano-acmoe"),
        *(f"{name}={value}" for name, value in named.items()),
        *(f"data.folder={corpus}", f"parallel.data={world}"),
    ]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def workers(launcher: int) -> Iterator[tuple[int, int]]:
    """Yield rank and process id of the processes that torchrun started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"PPid:\s*(\d+)", (folder / "status").read_text())[1])  # type: ignore[index]
            variables = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, TypeError):
            continue
        rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
        if parent == launcher and rank is not None:
            yield int(rank), int(folder.name)


def wait_for_step(out: Path, step: int, run: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if (out / "metrics.jsonl").is_file() and len(records(out)) >= step:
            return
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no step within a minute")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_to_one_process_saves_one_checkpoint_and_ends_all(
    tmp_path: Path, corpus: Path
) -> None:
    long = ("steps=100000", "eval_every=100000", "checkpoint_every=100000")
    run = start(*command(2, corpus, tmp_path / "run", *long))
    wait_for_step(tmp_path / "run", 3, run)
    os.kill(dict(workers(run.pid))[1], signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1  # torchrun's own: its processes ended with 143
    (saved,) = checkpoints(tmp_path / "run" / "checkpoints")
    step = int(saved.name.removeprefix("step-"))
    assert said.count(f"stopped at step {step} of 100000, saved in") == 1
    assert records(tmp_path / "run")[-1]["step"] == step


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_process_is_started_again_from_the_last_checkpoint(
    tmp_path: Path, corpus: Path
) -> None:
    settings = ("steps=60", "eval_every=60", "checkpoint_every=10", "parallel.shard=fsdp")
    run = start(*command(2, corpus, tmp_path / "run", *settings, restarts=1))
    wait_for_step(tmp_path / "run", 15, run)
    os.kill(dict(workers(run.pid))[1], signal.SIGKILL)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert "continuing after step" in said
    assert [r["step"] for r in records(tmp_path / "run") if r["kind"] == "train"] == [*range(1, 61)]
    whole = start(*command(2, corpus, tmp_path / "whole", *settings))
    said, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, said
    again, once = records(tmp_path / "run")[-2], records(tmp_path / "whole")[-2]
    assert again["loss"] == pytest.approx(once["loss"], abs=1e-5)


def test_a_loss_that_is_not_finite_is_reported_once(tmp_path: Path, corpus: Path) -> None:
    settings = ("steps=50", "lr=1e30", "warmup=0", "min_lr=0", "clip=none")
    run = start(*command(2, corpus, tmp_path / "run", *settings))
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert (
        len(re.findall(r"acmoe: .*step \d+ gave a loss or gradient that is not finite", said)) == 1
    )


def test_a_mistake_is_reported_once(tmp_path: Path, corpus: Path) -> None:
    run = start(*command(2, corpus, tmp_path / "run", "model.vocab_size=300"))
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert said.count("model.vocab_size=300, but") == 1


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_four_processes_train_as_one(tmp_path: Path, corpus: Path, shard: str) -> None:
    settings = ("steps=10", "split=2", "clip=1.0", "eval_every=10", "checkpoint_every=10")
    run = start(*command(4, corpus, tmp_path / "four", *settings, f"parallel.shard={shard}"))
    said, _ = run.communicate(timeout=180)
    assert run.returncode == 0, said
    alone = start(*command(1, corpus, tmp_path / "one", *settings))
    said, _ = alone.communicate(timeout=60)
    assert alone.returncode == 0, said
    for found, expected in zip(records(tmp_path / "four"), records(tmp_path / "one"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_routers_may_be_frozen_under_way(tmp_path: Path, corpus: Path) -> None:
    """StableMoE freezes its routers after a tenth of the steps: DDP then expects no gradient."""
    frozen = ("steps=20", "eval_every=20", "model.router=stable")
    arguments = command(2, corpus, tmp_path / "run", *frozen)
    run = start(*(each for each in arguments if "statistics_group" not in each))
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert len([r for r in records(tmp_path / "run") if r["kind"] == "train"]) == 20
