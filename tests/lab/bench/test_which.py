"""The list of what runs, on a CPU: every op answers for itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.lab.bench import which as which_module
from acmoe.lab.bench.shapes import SHAPES
from acmoe.lab.bench.which import rivals, which
from acmoe.ops.device import tuning
from acmoe.ops.dispatch import use_backend
from acmoe.ops.experts.grouped import grouped_linear
from acmoe.routing.statistics import ClusterStatistics

CPU = torch.device("cpu")
OLMOE = SHAPES["olmoe"]
OPS = ("experts", "statistics", "embedding", "norms", "attention", "map attention")


def running() -> dict[str, str]:
    return {choice.op: choice.backend for choice in which(CPU, torch.float32, OLMOE) if choice.runs}


def test_one_backend_of_each_op_runs_and_the_others_say_why_not() -> None:
    choices = which(CPU, torch.bfloat16, OLMOE)
    assert {choice.op for choice in choices} == set(OPS)
    slow = "interpreter is slow"
    reasons = dict.fromkeys(("norms", "attention", "map attention"), slow)
    reasons["embedding"] = "in order anyway"
    for op in OPS:
        mine = {choice.backend: choice for choice in choices if choice.op == op}
        assert [name for name, choice in mine.items() if choice.runs] == ["torch"]
        assert reasons.get(op, "CUDA") in (mine["triton"].obstacle or "")
        assert mine["torch"].obstacle is None


def test_a_request_that_cannot_be_met_still_names_what_runs() -> None:
    with use_backend("grouped_mm"):
        assert running() == dict.fromkeys(OPS, "torch")


def test_an_interpreter_that_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Its kernels would be launched: those of the other ops only in a backward, or not at all.
    monkeypatch.setattr(which_module, "_statistics", lambda device, dtype: "torch")
    with use_backend("triton"):
        found = running()
    kernels = ("hidden", "down", "input", "down_weight", "up_weight")
    parts = [f"experts: {kernel}" for kernel in kernels]
    parts += ["attention: forward", "attention: backward"]
    assert found == {**dict.fromkeys((*OPS, *parts), "triton"), "statistics": "torch"}


def test_statistics_by_an_op_of_our_own_are_told_from_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = ClusterStatistics.cluster_scale

    def by_own_op(self: ClusterStatistics, x: Tensor, *others: Any) -> Tensor:
        end = torch.tensor([x.shape[1]])
        grouped_linear(x[0], torch.ones(1, 1, x.shape[2], dtype=x.dtype), end)
        return plain(self, x, *others)

    monkeypatch.setattr(ClusterStatistics, "cluster_scale", by_own_op)
    assert running() == {**dict.fromkeys(OPS, "torch"), "statistics": "triton"}


def test_rivals_that_can_take_part_have_no_obstacle() -> None:
    found = {choice.backend: choice for choice in rivals(CPU, torch.bfloat16, OLMOE)}
    assert found["acmoe"].runs and found["acmoe"].obstacle is None
    assert not found["sonicmoe"].runs and found["sonicmoe"].obstacle


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ACMOE_GLUON", "yes", "ACMOE_GLUON='yes' is unknown"),
        ("ACMOE_KEEP_ATTENTION", "yes", "ACMOE_KEEP_ATTENTION='yes' is unknown"),
        ("ACMOE_TUNED", "nowhere.json", "ACMOE_TUNED=nowhere.json does not exist"),
    ],
)
def test_a_wish_nobody_knows_is_named_on_any_machine(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    tuning.forget()
    with pytest.raises(UserError, match=reason):
        which(CPU, torch.bfloat16, OLMOE)
    monkeypatch.undo()
    tuning.forget()
