"""Settings of several processes that cannot be, and processes that do not come, are named."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launched import ports
from torch import nn
from torch.distributed import HashStore

import acmoe
from acmoe.config.parallel import ParallelConfig
from acmoe.config.text.train import RunConfig
from acmoe.distributed import start
from acmoe.distributed.experts import distribute_experts
from acmoe.distributed.failure import FailureWatch
from acmoe.errors import UserError
from acmoe.train.run import train
from tiny_runs import QUIET, tiny_run
from tiny_vision_runs import tiny_vision_run

TWO = "parallel.data=2"


def config(*settings: str) -> RunConfig:
    return tiny_run(Path("corpus"), *settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("parallel.data=3",), "batch=4 streams in split=2 micro-batches cannot be divided"),
        ((TWO, "graph=true"), "graph=true replays the updates of one process"),
        ((TWO, "compile=true"), "compile=true has not been tried"),
        ((TWO, "device=cuda:0"), "is one device"),
        (
            (TWO, "parallel.expert=2", "model.num_experts=5"),
            "parallel.expert=2 does not divide num_experts=5",
        ),
        ((TWO, "parallel.expert=3"), "parallel.expert=3 must divide parallel.data=2"),
        (("parallel.data=0",), "parallel.data=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(*settings)


def test_an_average_of_sharded_weights_is_refused() -> None:
    with pytest.raises(UserError, match=r"ema=0\.9 averages whole weights"):
        tiny_vision_run(TWO, "parallel.shard=fsdp", "ema=0.9")
    with pytest.raises(UserError, match=r"parallel\.expert=2 a process has parts of them"):
        tiny_vision_run(TWO, "parallel.expert=2", "ema=0.9")


def test_layers_whose_experts_cannot_be_distributed_are_refused() -> None:
    four: Any = SimpleNamespace(size=lambda: 4)  # a mesh
    soft = acmoe.SoftMoE(dim=4, hidden=4, num_experts=4)
    with pytest.raises(UserError, match=r"parallel\.expert=4 .* SoftMoE gives every expert"):
        distribute_experts(soft, four)
    with pytest.raises(UserError, match="the model has no MoE layer"):
        distribute_experts(nn.Linear(2, 2), four)
    with pytest.raises(UserError, match="does not divide num_experts=6"):
        distribute_experts(acmoe.MoE(dim=4, hidden=4, num_experts=6, top_k=1), four)


def test_several_processes_need_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["acmoe", "train", "switch-nano", "parallel.data=2"])
    command = "torchrun --standalone --nproc-per-node 2 -m acmoe train switch-nano parallel.data=2"
    with pytest.raises(UserError, match=re.escape(command)):
        train(config(TWO), tmp_path, console=QUIET)


def test_the_launcher_must_start_as_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"started 4; give parallel\.data=4"):
        train(config(TWO), tmp_path, console=QUIET)


def test_a_process_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(ports(1)[0])}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "TIMEOUT", 1.0)
    with (
        pytest.raises(UserError, match="rank 1 of 2 did not start within 1 s"),
        start.joined(ParallelConfig(data=2), "cpu"),
    ):
        pass


def test_a_process_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up waiting; rank 1 does something else, and nothing is heard of rank 2."""
    monkeypatch.setattr("acmoe.distributed.failure.LOOK_EVERY", 0.05)
    store, ended, watches = HashStore(), threading.Event(), []

    def busy_elsewhere() -> None:
        watches.append(FailureWatch(store, 1, 3))
        ended.wait(60)

    other = threading.Thread(target=busy_elsewhere)
    other.start()
    watches.append(FailureWatch(store, 0, 3))
    timeout = RuntimeError("[unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation")
    said = str(watches[-1].explained(timeout))
    another = ValueError("not a timeout")
    assert watches[-1].explained(another) is another
    ended.set()
    other.join()
    for watch in watches:
        watch.close()
    assert re.search(r"waiting in a collective: rank 1 is at threading.py:\d+, in wait; ", said)
    assert "rank 2 does not answer" in said
