"""The experts on a CPU without gradients, against loops in float64 and against the definition.

D features, F hidden units, E experts, K experts of the token.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_loops import layer
from torch import Tensor

from acmoe import MoE
from acmoe.ops.dispatch import record_choices, use_backend
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.experts.cpu import by_expert
from acmoe.ops.sort import Rows, sort_rows

pytestmark = pytest.mark.usefixtures("no_native_here")
Call = tuple[Tensor, ExpertWeights, Rows, Tensor]
SWIGLU: dict[str, Any] = {"activation": "swiglu", "complete": True}


def call(
    *,
    dim: int = 5,
    hidden: int = 3,
    experts: int = 4,
    top_k: int = 2,
    activation: str = "swiglu",
    bias: bool = False,
    tokens: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype)

    width = 2 * hidden if activation == "swiglu" else hidden
    biases = (normal(experts, width), normal(experts, dim)) if bias else (None, None)
    weights = ExpertWeights(normal(experts, width, dim), normal(experts, dim, hidden), *biases)
    ids_TK = torch.stack([torch.randperm(experts, generator=generator)[:top_k]] * tokens)
    gate_TK = normal(tokens, top_k).softmax(-1)
    return normal(tokens, dim), weights, sort_rows(ids_TK, experts), gate_TK


def kernel_of(*args: Any, **options: Any) -> str:
    with record_choices() as choices:
        expert_mlp(*args, **options)
    return choices[0].kernel


@given(
    dim=st.integers(1, 40),
    hidden=st.integers(1, 33),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    activation=st.sampled_from(["relu", "gelu", "swiglu"]),
    bias=st.booleans(),
    recording=st.booleans(),
    seed=st.integers(0, 99),
)
def test_one_token_gets_the_weighted_outputs_of_its_experts(
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    activation: str,
    bias: bool,
    recording: bool,
    seed: int,
) -> None:
    sizes = {"dim": dim, "hidden": hidden, "experts": experts, "top_k": min(top_k, experts)}
    x, weights, rows, gate = call(**sizes, activation=activation, bias=bias, seed=seed)
    options: dict[str, Any] = {"activation": activation, "complete": True}
    with torch.set_grad_enabled(recording):  # nothing here has a gradient
        assert kernel_of(x, weights, rows, gate, **options) == "cpu"
        found = expert_mlp(x, weights, rows, gate, **options)
    ids = rows.expert[rows.inverse].tolist()
    named = {name: one for name, one in weights._asdict().items() if one is not None}
    torch.testing.assert_close(found, layer(x, [ids], [list(gate[0])], named, activation))


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_rounds_as_the_definition_does_up_to_a_few_sums(
    activation: str, bias: bool, poisoned_empty: None
) -> None:
    sizes = {"dim": 61, "hidden": 35, "experts": 16, "top_k": 5}
    case = call(**sizes, activation=activation, bias=bias, dtype=torch.float32)
    options: dict[str, Any] = {"activation": activation, "complete": True}
    assert kernel_of(*case, **options) == "cpu"
    wanted = expert_mlp.definition(*case, **options)
    # Up to 61 products and 5 experts are added, in another order: numbers of some 61 * 35 * 0.6
    # at most, each sum off by 2^-24 of them.
    torch.testing.assert_close(expert_mlp(*case, **options), wanted, rtol=1e-5, atol=1e-4)


@given(
    tokens=st.integers(2, 40),
    dim=st.integers(1, 40),
    hidden=st.integers(1, 33),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    activation=st.sampled_from(["relu", "gelu", "swiglu"]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_several_tokens_get_the_bits_of_the_definition(
    tokens: int,
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    activation: str,
    bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    sizes = {"dim": dim, "hidden": hidden, "experts": experts, "top_k": min(top_k, experts)}
    case = call(**sizes, tokens=tokens, activation=activation, bias=bias, dtype=dtype, seed=seed)
    # Each token chooses experts of its own: some have many rows, some one or none.
    affinity_TE = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    ids_TK = affinity_TE.topk(sizes["top_k"]).indices
    args = (*case[:2], sort_rows(ids_TK, experts), case[3])
    options: dict[str, Any] = {"activation": activation, "complete": True}
    assert kernel_of(*args, **options) == "cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_expert, "MOST_EXPERTS", 0)  # a loop over experts
        found = expert_mlp(*args, **options)
        assert torch.equal(found, expert_mlp.definition(*args, **options))
    named = {name: one.double() for name, one in case[1]._asdict().items() if one is not None}
    gates = [list(row) for row in case[3].double()]
    wanted = layer(case[0].double(), ids_TK.tolist(), gates, named, activation)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [2, 3, 16, 80])
@pytest.mark.skipif(not by_expert.has_grouped_on_cpu(), reason="torch has no grouped GEMM for CPUs")
def test_few_rows_of_small_experts_are_multiplied_in_one_call(
    tokens: int, bias: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"dim": 20, "hidden": 24, "experts": 6, "top_k": 2, "tokens": tokens}
    x, weights, _, gate = call(**sizes, activation=activation, bias=bias, dtype=torch.float32)
    # Expert 5 has no rows.
    ids_TK = torch.randn(tokens, 5, generator=torch.Generator().manual_seed(0)).topk(2).indices
    rows = sort_rows(ids_TK, 6)
    calls = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return grouped_mm(*args, **options)

    grouped_mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    monkeypatch.setattr(by_expert, "chooses_onednn", lambda x: False)
    found = expert_mlp(x, weights, rows, gate, activation=activation, complete=True)
    assert len(calls) == 2
    named = {name: one.double() for name, one in weights._asdict().items() if one is not None}
    gates = [list(row) for row in gate.double()]
    wanted = layer(x.double(), ids_TK.tolist(), gates, named, activation)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


def test_weights_may_be_transposed_views() -> None:
    x, weights, rows, gate = call(dim=6, hidden=4)
    viewed = weights._replace(
        up=weights.up.mT.contiguous().mT, down=weights.down.mT.contiguous().mT
    )
    assert kernel_of(x, viewed, rows, gate, **SWIGLU) == "cpu"
    torch.testing.assert_close(
        expert_mlp(x, viewed, rows, gate, **SWIGLU), expert_mlp(x, weights, rows, gate, **SWIGLU)
    )


def test_an_expert_with_gate_0_and_an_infinite_weight_gives_nan_as_in_the_definition() -> None:
    x, weights, rows, gate = call()
    weights.down[rows.expert[rows.inverse[1]]] = torch.inf
    gate = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert kernel_of(x, weights, rows, gate, **SWIGLU) == "cpu"
    assert expert_mlp(x, weights, rows, gate, **SWIGLU).isnan().all()
    assert expert_mlp.definition(x, weights, rows, gate, **SWIGLU).isnan().all()


class Traced(Tensor):
    """A subclass, whose calls somebody may observe."""


def test_other_calls_run_the_definition() -> None:
    x, weights, rows, gate = call()
    none = (x[:0], weights, sort_rows(torch.empty(0, 2, dtype=torch.int64), 4), gate[:0])
    narrow = call(dtype=torch.bfloat16)
    single = weights._replace(up=weights.up.float())
    for other in (none, narrow, (x.as_subclass(Traced), *call()[1:])):
        assert kernel_of(*other, **SWIGLU) == "torch"
    # A token of float64 is multiplied by weights that the definition casts.
    assert kernel_of(x, single, rows, gate, **SWIGLU) == "torch"
    assert kernel_of(x, weights, rows, gate, **SWIGLU, dropout=0.5) == "torch"
    assert kernel_of(x, weights, rows, gate, activation="swiglu") == "torch"
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel_of(x, weights, rows, gate, **SWIGLU) == "torch"


def test_a_layer_decodes_one_token_as_the_definition_does() -> None:
    torch.manual_seed(0)
    moe = MoE(dim=16, hidden=8, num_experts=6, top_k=3, router="adaptive").eval()
    x = torch.randn(1, 1, 16)
    with torch.no_grad(), record_choices() as choices:
        found, _ = moe(x)
    assert {choice.op: choice.kernel for choice in choices}["expert_mlp"] == "cpu"
    with torch.no_grad(), use_backend("torch"):
        wanted, _ = moe(x)
    torch.testing.assert_close(found, wanted)
