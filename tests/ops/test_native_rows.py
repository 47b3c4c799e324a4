"""Sorted rows and experts in C, against the definition and loops in float64.

T tokens, K experts per token, D features, F hidden units, E experts.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe import MoE
from acmoe.ops.dispatch import record_choices
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.experts.cpu import native
from acmoe.ops.native.library import missing
from acmoe.ops.sort import Rows, sort_rows

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no C kernels here: {missing()}")
Call = tuple[Tensor, ExpertWeights, Rows, Tensor]


def call(
    *,
    tokens: int = 6,
    dim: int = 5,
    hidden: int = 3,
    experts: int = 4,
    top_k: int = 2,
    activation: str = "relu",
    bias: bool = False,
    seed: int = 0,
) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    width = 2 * hidden if activation == "swiglu" else hidden
    biases = (normal(experts, width), normal(experts, dim)) if bias else (None, None)
    weights = ExpertWeights(normal(experts, width, dim), normal(experts, dim, hidden), *biases)
    ids_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    gate_TK = normal(tokens, top_k).softmax(-1)
    return normal(tokens, dim), weights, sort_rows(ids_TK, experts), gate_TK


def kernel_of(*args: Any, **options: Any) -> str:
    with record_choices() as choices:
        expert_mlp(*args, **{"activation": "relu", "complete": True, **options})
    return choices[0].kernel


def by_loops(
    x: Tensor, weights: ExpertWeights, rows: Rows, gate: Tensor, activation: str
) -> Tensor:
    """Return (T, D) in float64, one token and expert after the other."""
    up, down, up_bias, down_bias = (None if one is None else one.double() for one in weights)
    assert up is not None and down is not None
    out_TD = torch.zeros(x.shape, dtype=torch.float64)
    ids_N = rows.expert[rows.inverse].tolist()
    for row, expert in enumerate(ids_N):
        token, choice = divmod(row, gate.shape[1])
        h = up[expert] @ x[token].double() + (0 if up_bias is None else up_bias[expert])
        if activation == "swiglu":
            half = len(h) // 2
            h = h[:half] / (1 + (-h[:half]).exp()) * h[half:]
        elif activation == "gelu":
            h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
        else:
            h = h.clamp(min=0)
        y = down[expert] @ h + (0 if down_bias is None else down_bias[expert])
        out_TD[token] += float(gate[token, choice]) * y
    return out_TD


@given(
    tokens=st.integers(1, 24),
    dim=st.integers(1, 20),
    hidden=st.integers(1, 18),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 6),
    activation=st.sampled_from(["relu", "gelu", "swiglu"]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_token_gets_the_weighted_outputs_of_its_experts(
    tokens: int,
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    activation: str,
    bias: bool,
    seed: int,
) -> None:
    sizes = {"tokens": tokens, "dim": dim, "hidden": hidden, "experts": experts, "seed": seed}
    args = call(**sizes, top_k=min(top_k, experts), activation=activation, bias=bias)
    assert kernel_of(*args, activation=activation) == "native"
    found = expert_mlp(*args, activation=activation, complete=True)
    wanted = by_loops(*args, activation)
    scale = max(1.0, float(wanted.abs().max()))
    assert (found - wanted).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("tokens", [6, 100])
@pytest.mark.parametrize("trained", [False, True])
def test_nan_stays_nan(activation: str, tokens: int, trained: bool) -> None:
    x, weights, rows, gate = call(bias=True, tokens=tokens, experts=2, activation=activation)
    assert weights.up_bias is not None
    weights.up_bias[:, 0] = math.nan
    given = (x.requires_grad_(trained), weights, rows, gate)
    assert kernel_of(*given, activation=activation) == "native"
    assert expert_mlp(*given, activation=activation, complete=True).isnan().all()


def test_large_units_of_swiglu_are_what_they_are_in_float64() -> None:
    x, weights, rows, gate = call(activation="swiglu", hidden=8, dim=8)
    x, up = x * 1e3, weights.up.clone()
    up[:, 0] = 0.0  # and a gate of exactly 0
    weights = weights._replace(up=up)
    found = expert_mlp(x, weights, rows, gate, activation="swiglu", complete=True)
    wanted = by_loops(x, weights, rows, gate, "swiglu")
    assert (found - wanted).abs().max() <= 1e-5 * float(wanted.abs().max())


def test_other_calls_run_other_kernels() -> None:
    x, weights, rows, gate = call(bias=True)
    assert kernel_of(x, weights, rows, gate) == "native"
    assert kernel_of(x, weights, rows, gate, dropout=0.5) == "torch"
    assert kernel_of(x, weights, rows, gate, complete=False) == "torch"
    viewed = weights._replace(up=weights.up.mT.contiguous().mT)
    assert kernel_of(x, viewed, rows, gate) == "cpu"
    sizes = {"tokens": 12, "experts": 2}  # 24 rows of 3 hidden units
    few, many = (call(dim=native.MOST // 72 + more, **sizes) for more in (0, 1))
    assert [kernel_of(*few), kernel_of(*many)] == ["native", "cpu"]


def test_the_weights_that_are_read_or_trained_are_few_enough_for_one_thread() -> None:
    def kernel(trained: bool, experts: int, dim: int) -> str:
        x, weights, rows, gate = call(tokens=1, experts=experts, dim=dim)
        return kernel_of(x.requires_grad_(trained), weights, rows, gate)

    read = native.MOST_WEIGHTS // 6  # features of 2 experts with 3 hidden units
    assert [kernel(False, 9, read), kernel(False, 9, read + 1)] == ["native", "cpu"]
    all_nine = native.MOST_WEIGHTS // 27
    assert [kernel(True, 9, all_nine), kernel(True, 9, all_nine + 1)] == ["native", "cpu"]


def test_sizes_that_do_not_fit_are_left_to_torch() -> None:
    x, weights, rows, gate = call(bias=True)
    wide, biases = torch.randn(6, 7), (weights.up_bias, torch.randn(4, 9))
    for other in (
        (wide, weights, rows, gate),
        (x[:3], weights, rows, gate),
        (x, weights, rows, gate[:, :1].contiguous()),
        (x, ExpertWeights(weights.up, weights.down, *biases), rows, gate),
        (x, weights._replace(down=weights.down[:, :, :2].contiguous()), rows, gate),
        (x, weights, rows._replace(permutation=rows.permutation.int()), gate),
        (x, weights, rows._replace(offsets=rows.offsets[:2]), gate),
    ):
        reasons = expert_mlp.reasons(*other, activation="relu", complete=True)
        assert reasons["native"] in (
            "tokens, weights, rows and gates do not fit each other",
            "it takes contiguous int64 ids",
        )


def test_rows_that_do_not_exist_are_left_to_torch() -> None:
    x, weights, rows, gate = call()
    beyond = rows._replace(permutation=rows.permutation + 4)
    with pytest.raises((IndexError, RuntimeError)):
        expert_mlp(x, weights, beyond, gate, activation="relu", complete=True)
    with pytest.raises((IndexError, RuntimeError)):
        outside = rows._replace(inverse=rows.inverse + 4)
        expert_mlp(x, weights, outside, gate, activation="relu", complete=True)
    learned = x.clone().requires_grad_()
    for wrong in (beyond, outside):
        with pytest.raises((IndexError, RuntimeError)):
            expert_mlp(learned, weights, wrong, gate, activation="relu", complete=True)


def test_the_gradients_of_rows_without_an_expert_are_those_of_the_definition() -> None:
    x, weights, rows, gate = call()
    short = rows._replace(offsets=(rows.offsets - 3).clamp(min=0))
    x.requires_grad_()
    found = expert_mlp(x, weights, short, gate, activation="relu", complete=True)
    wanted = expert_mlp.definition(x, weights, short, gate, activation="relu")
    assert torch.equal(found, wanted)
    results = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted)]
    assert torch.equal(*results)


@given(
    rows=st.integers(1, 50), experts=st.integers(1, 9), none=st.booleans(), seed=st.integers(0, 99)
)
def test_rows_are_sorted_stably(rows: int, experts: int, none: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(experts + none, (rows, 2), generator=generator)  # E: no expert
    with record_choices() as choices:
        found = sort_rows(ids_TK, experts)
    assert choices[0].kernel == "native"
    wanted = sort_rows.definition(ids_TK, experts)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_ids_out_of_range_are_sorted_as_by_the_definition() -> None:
    for ids_TK in (torch.tensor([[3], [-1], [0]]), torch.tensor([[2**40], [1], [7]])):
        found, wanted = sort_rows(ids_TK, 2), sort_rows.definition(ids_TK, 2)
        assert torch.equal(found.expert, wanted.expert)
        assert torch.equal(found.offsets, wanted.offsets)


def test_a_layer_of_few_tokens_runs_in_c() -> None:
    torch.manual_seed(0)
    moe = MoE(dim=16, hidden=8, num_experts=6, top_k=3).eval()
    x = torch.randn(3, 16)
    wanted = moe(x)[0].detach()
    with torch.no_grad(), record_choices() as choices:
        found, _ = moe(x)
    assert {choice.kernel for choice in choices} == {"native"}
    torch.testing.assert_close(found, wanted)
