"""Capacity in Tutel's semantics, against a loop that fills the experts one row at a time.

T tokens, E experts, K experts per token.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_loops import layer, within_capacity

from acmoe import (
    AdaptiveConfig,
    ExpertChoiceConfig,
    MoE,
    Routing,
    RoutingState,
    SMoEConfig,
    ThresholdConfig,
)
from acmoe.experts.capacity import limit_capacity


def routing_of(affinity, k):
    gate, ids = affinity.softmax(-1).topk(k)
    return Routing(ids, gate, affinity, torch.zeros(()))


@given(
    num_tokens=st.integers(1, 20),
    num_experts=st.integers(1, 5),
    k=st.integers(1, 3),
    factor=st.sampled_from([0.3, 0.5, 1.0, 1.05, 1.25, 2.0, 100.0]),
    padding=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_are_kept_as_a_loop_over_choices_and_gates_keeps_them(
    num_tokens, num_experts, k, factor, padding, seed
):
    k = min(k, num_experts)
    generator = torch.Generator().manual_seed(seed)
    affinity = torch.randn(num_tokens, num_experts, generator=generator)
    routing = routing_of(affinity + torch.arange(num_experts) / 2, k)  # skewed: some must drop
    mask = torch.rand(num_tokens, generator=generator) < 0.7 if padding else None
    found = limit_capacity(routing, num_experts, k, factor, mask)
    real = [True] * num_tokens if mask is None else mask.tolist()
    kept = within_capacity(
        routing.expert_ids.tolist(), routing.gate.tolist(), num_experts, k, factor, real
    )
    kept = torch.tensor(kept)
    assert torch.equal(found.expert_ids, routing.expert_ids.where(kept, num_experts))
    assert torch.equal(found.gate, routing.gate.where(kept, 0.0))
    assert torch.equal(found.affinity, routing.affinity)


def test_the_number_of_places_is_counted_without_rounding_errors():
    # Three rows of each of 120 tokens ask for the one expert. Factor 1.05: 126 places for each of
    # the k choices, though 1.05 * 120 falls short of 126 in float32.
    ids = torch.zeros(120, 3, dtype=torch.int64)
    gate = torch.rand(120, 3)
    routing = Routing(ids, gate, torch.zeros(120, 1), torch.zeros(()))
    assert (limit_capacity(routing, 1, 2, 1.05).expert_ids == 0).sum() == 252
    assert (limit_capacity(routing, 1, 1, 1.05).expert_ids == 0).sum() == 126


def test_first_choices_fill_before_second_ones_and_larger_gates_go_first_by_hand():
    # Three tokens, two experts, k = 2, factor 0.5: 2 * floor(0.5 * ceil(3/2)) = 2 places each.
    # Queue: first choices by gate: t2 -> 0 (0.9), t0 -> 0 (0.8), t1 -> 0 (0.6): t1 is one too many.
    # Second choices by the same order: t2 -> 1, t0 -> 1, t1 -> 1: again t1.
    gate = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.9, 0.1]])
    ids = torch.tensor([[0, 1], [0, 1], [0, 1]])
    found = limit_capacity(Routing(ids, gate, gate, torch.zeros(())), 2, 2, 0.5)
    assert found.expert_ids.tolist() == [[0, 1], [2, 2], [0, 1]]
    assert found.gate[1].tolist() == [0, 0]


def test_equal_gates_are_served_in_the_order_of_tokens():
    ids, gate = torch.zeros(5, 1, dtype=torch.int64), torch.full((5, 1), 0.5)
    found = limit_capacity(Routing(ids, gate, gate, torch.zeros(())), 2, 1, 1.0)
    assert found.expert_ids.flatten().tolist() == [0, 0, 0, 2, 2]


def crowded(**options):
    """A layer whose tokens nearly all prefer expert 0."""
    torch.manual_seed(0)
    moe = MoE(dim=6, hidden=5, num_experts=4, top_k=2, capacity_factor=1.0, **options).double()
    router = getattr(moe.router, "base", moe.router)
    with torch.no_grad():
        router.embedding[0] += 3.0
    x = torch.rand(16, 6, dtype=torch.float64, requires_grad=True)
    state = RoutingState.identity(num_tokens=16, num_clusters=4, dim=6)
    return moe, x, state


def test_a_dropped_row_adds_nothing_to_the_output_and_sends_no_gradient():
    moe, x, state = crowded(router=SMoEConfig(gate="all"))
    y, _ = moe(x, state)
    routing = moe.router(x, state)
    kept = torch.tensor(
        within_capacity(routing.expert_ids.tolist(), routing.gate.tolist(), 4, 2, 1.0, [True] * 16)
    )
    assert 0 < kept.sum() < 32
    ids = routing.expert_ids.where(kept, 4).tolist()
    weights = dict(moe.experts.named_parameters())
    wanted = layer(x, ids, list(routing.gate.unbind()), weights, "relu")
    torch.testing.assert_close(y, wanted)
    gone = kept.any(1).logical_not()
    assert gone.any()
    assert (y[gone] == 0).all()
    parameters = [x, *moe.parameters()]
    got = torch.autograd.grad(y.square().sum(), parameters)
    expected = torch.autograd.grad(wanted.square().sum(), parameters)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_clusters_are_those_of_the_choice_before_dropping():
    moe, x, state = crowded(router=AdaptiveConfig(statistics="batch"))
    y, after = moe(x, state)
    assert (y == 0).all(1).any()
    assert after.assignment.flatten().tolist() == [0] * 16
    unlimited = MoE(dim=6, hidden=5, num_experts=4, top_k=2, router=moe.router).double()
    for a, b in zip(unlimited(x, state)[1][:4], after[:4], strict=True):
        assert torch.equal(a, b)


def test_masked_tokens_take_no_place():
    moe, x, state = crowded()
    mask = torch.arange(16) % 2 == 0
    y, _ = moe(x, state, token_mask=mask)
    alone, _ = moe(x[mask], RoutingState.identity(num_tokens=8, num_clusters=4, dim=6))
    torch.testing.assert_close(y[mask], alone)
    assert (y[~mask] == 0).all()


@pytest.mark.parametrize("router", [ThresholdConfig(threshold=0.1), ExpertChoiceConfig()])
def test_routers_with_a_column_per_expert_are_limited_by_the_layers_top_k(router):
    # k floor(f ceil(T/E)) = 2 floor(0.5 * 4) = 4 rows an expert, however many columns there are.
    torch.manual_seed(0)
    moe = MoE(dim=6, hidden=5, num_experts=4, top_k=2, router=router, capacity_factor=0.5)
    routing = moe.router(
        torch.rand(16, 6), RoutingState.identity(num_tokens=16, num_clusters=4, dim=6)
    )
    assert routing.expert_ids.shape[1] == 4
    found = limit_capacity(routing, 4, 2, 0.5)
    load = torch.bincount(found.expert_ids.flatten(), minlength=5)[:4]
    assert load.tolist() == [4, 4, 4, 4]


def test_capacity_holds_in_evaluation_too():
    moe, x, state = crowded()
    moe.eval()
    assert (moe(x, state)[0] == 0).all(1).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("router", "factor"),
    [("expert-choice", None), *((name, 0.5) for name in ("smoe", "threshold", "adaptive"))],
)
def test_a_token_of_nan_or_inf_takes_no_place_and_changes_no_other_result(router, factor, bad):
    # 12 tokens and the 11 without the bad one have the same capacity: ceil(12 / 4) = ceil(11 / 4)
    # rows a choice, and ceil(2 * 12 / 4) = ceil(2 * 11 / 4) tokens of an expert that chooses.
    torch.manual_seed(0)
    sizes = {"dim": 8, "hidden": 16, "num_experts": 4, "top_k": 2}
    moe = MoE(**sizes, router=router, capacity_factor=factor)
    x = torch.randn(12, 8)
    x[5] = bad
    good = torch.arange(12) != 5
    y, _ = moe(x)
    expected, _ = moe(x, token_mask=good)
    assert y[5].isnan().all()
    assert torch.equal(y[good], expected[good]) and expected[good].isfinite().all()
    dropped = (expected[good] == 0).all(1)
    assert dropped.any() or factor is None  # places are few: the bad token would have taken one
