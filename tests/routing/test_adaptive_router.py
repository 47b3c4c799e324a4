"""The adaptive router against loops over scalars, and by hand.

T tokens, D features, E experts, C = E clusters, J clusters per token.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from router_loops import dispersion, dot, matrix, rescaled, rows, scales, top_k_gate

from acmoe import (
    AdaptiveConfig,
    ExpertChoiceConfig,
    LossConfig,
    MoE,
    RandomConfig,
    Routing,
    RoutingState,
    SMoEConfig,
    build_router,
)
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.next_state import NextState


def build(config, *, dim=6, num_experts=4, top_k=2, seed=0):
    torch.manual_seed(seed)
    losses = LossConfig(z=0.1)
    return build_router(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)


def some_state(num_tokens, num_clusters, dim, *, mix=1, seed=0):
    """A state as the layer before would return it; some tokens stand in no cluster."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, num_clusters, generator=generator).argsort(1)[:, :mix]
    order[torch.rand(num_tokens, generator=generator) < 0.15] = -1
    share = torch.rand(num_tokens, mix, generator=generator, dtype=torch.float64)
    scale = torch.rand(num_clusters, dim, generator=generator, dtype=torch.float64) + 0.5
    return RoutingState(
        order.contiguous(), share / share.sum(1, keepdim=True), scale, torch.zeros(())
    )


@given(
    num_tokens=st.integers(1, 9),
    dim=st.integers(1, 4),
    num_experts=st.integers(1, 4),
    measure=st.sampled_from(["mad", "variance", "std", "gini", "iqr"]),
    normalize=st.sampled_from(["cluster", "feature", "global"]),
    strength=st.sampled_from([None, 0.3, 2.0]),
    mix=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_with_its_own_tokens_statistics_the_router_equals_a_loop_over_scalars(
    num_tokens, dim, num_experts, measure, normalize, strength, mix, seed
):
    mix = min(mix, num_experts)
    config = AdaptiveConfig(
        base=SMoEConfig(gate="all"),
        statistics="batch",
        statistics_of="current",
        measure=measure,
        normalize=normalize,
        strength=strength,
        mix=mix,
    )
    router = build(config, dim=dim, num_experts=num_experts, top_k=1, seed=seed).double()
    state = some_state(num_tokens, num_experts, dim, mix=mix, seed=seed)
    x = torch.randn(num_tokens, dim, dtype=torch.float64)
    found = router(x, state)

    first = state.assignment[:, 0].tolist()
    scale = scales(
        dispersion(rows(x), first, num_experts, measure),
        dim,
        normalize=normalize,
        strength=strength,
    )
    moved = rescaled(rows(x), scale, state.assignment.tolist(), rows(state.membership))
    affinity = [[dot(row, e) for e in rows(router.base.embedding)] for row in moved]
    ids, gates = top_k_gate(affinity, 1, "all")
    torch.testing.assert_close(found.affinity, matrix(affinity), rtol=1e-9, atol=1e-10)
    assert found.expert_ids.tolist() == ids
    torch.testing.assert_close(found.gate, matrix(gates), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("normalize", ["cluster", "feature", "global"])
@pytest.mark.parametrize("measure", ["mad", "variance", "std", "gini", "iqr"])
def test_gradients_equal_those_of_the_loop_with_and_without_the_scale(measure, normalize, detach):
    config = AdaptiveConfig(
        statistics="batch",
        statistics_of="current",
        measure=measure,
        normalize=normalize,
        detach=detach,
        mix=2,
    )
    router = build(config, dim=3, num_experts=3, seed=5).double()
    state = some_state(10, 3, 3, mix=2, seed=7)
    x = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 3, dtype=torch.float64)
    parameters = [x, router.base.embedding]
    got = torch.autograd.grad((router(x, state).affinity * weight).sum(), parameters)

    leaves = [value.detach().clone().requires_grad_() for value in parameters]
    source = leaves[0].detach() if detach else leaves[0]
    spreads = dispersion(rows(source), state.assignment[:, 0].tolist(), 3, measure)
    scale = scales(spreads, 3, normalize=normalize)
    moved = rescaled(rows(leaves[0]), scale, state.assignment.tolist(), rows(state.membership))
    affinity = matrix([[dot(row, e) for e in rows(leaves[1])] for row in moved])
    wanted = torch.autograd.grad((affinity * weight).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@given(
    num_tokens=st.integers(1, 9),
    dim=st.integers(1, 4),
    num_experts=st.integers(1, 4),
    measure=st.sampled_from(["mad", "variance", "std", "gini", "iqr"]),
    normalize=st.sampled_from(["cluster", "feature", "global"]),
    mix=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_a_layer_emits_the_scale_and_clusters_of_its_own_tokens(
    num_tokens, dim, num_experts, measure, normalize, mix, seed
):
    mix = min(mix, num_experts)
    reader = AdaptiveConfig(statistics="batch", measure=measure, normalize=normalize, mix=mix)
    next_state = NextState(reader, num_clusters=num_experts, dim=dim)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64)
    affinity = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    routing = Routing(affinity.argmax(1, True), affinity, affinity, torch.tensor(0.25))
    before = RoutingState.identity(num_tokens=num_tokens, num_clusters=num_experts, dim=dim)
    state = next_state(x, routing, before._replace(aux_loss=torch.tensor(0.5)))

    chosen, share = top_k_gate(rows(affinity), mix, "selected")
    first = [ids[0] for ids in chosen]
    scale = scales(dispersion(rows(x), first, num_experts, measure), dim, normalize=normalize)
    assert state.assignment.tolist() == chosen
    torch.testing.assert_close(state.membership, matrix(share), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.scale, matrix(scale), rtol=1e-9, atol=1e-10)
    assert state.aux_loss == 0.75
    assert all(value.is_contiguous() for value in state[:4])


def test_the_previous_layers_scale_is_read_from_the_state_as_it_is():
    router = build(AdaptiveConfig(statistics="batch", mix=2), dim=3).double()
    state = some_state(8, 4, 3, mix=2, seed=2)
    x = torch.randn(8, 3, dtype=torch.float64)
    moved = rescaled(rows(x), rows(state.scale), state.assignment.tolist(), rows(state.membership))
    wanted = matrix([[dot(row, e) for e in rows(router.base.embedding)] for row in moved])
    torch.testing.assert_close(router(x, state).affinity, wanted, rtol=1e-12, atol=1e-12)


def test_two_clusters_through_two_layers_by_hand():
    # Layer one, e_0 = (1, 0), e_1 = (-1, 0): tokens 0 and 1 go to expert 0, tokens 2 and 3 to 1.
    #   cluster 0: (1, 0), (3, 8)     mean (2, 4)    s = (1, 4)   1/s = (1, 1/4), mean 5/8
    #   cluster 1: (-2, 1), (-6, 3)   mean (-4, 2)   s = (2, 1)   1/s = (1/2, 1), mean 3/4
    #   M_0 = (8/5, 2/5), M_1 = (2/3, 4/3)
    # Layer two, f_0 = (1, 0), f_1 = (0, 1): the affinities are the rescaled token itself.
    #   (1, 1.5) -> (1.6, 0.6)   plain routing sends it to 1; its cluster is tight along feature 0
    #   (2, -1)  -> (3.2, -0.4)
    #   (3, 2)   -> (2, 8/3)     plain routing sends it to 0; its cluster is tight along feature 1
    #   (-1, 1)  -> (-2/3, 4/3)
    config = AdaptiveConfig(statistics="batch", base=SMoEConfig(gate="all"))
    first, second = (
        MoE(dim=2, hidden=3, num_experts=2, top_k=1, router=config).double() for _ in range(2)
    )
    with torch.no_grad():
        first.router.base.embedding.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        second.router.base.embedding.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0], [3.0, 8.0], [-2.0, 1.0], [-6.0, 3.0]], dtype=torch.float64)
    _, state = first(x, RoutingState.identity(num_tokens=4, num_clusters=2, dim=2))
    assert state.assignment.tolist() == [[0], [0], [1], [1]]
    expected = torch.tensor([[8 / 5, 2 / 5], [2 / 3, 4 / 3]], dtype=torch.float64)
    torch.testing.assert_close(state.scale, expected)

    h = torch.tensor([[1.0, 1.5], [2.0, -1.0], [3.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    routing = second.router(h, state)
    expected = torch.tensor(
        [[1.6, 0.6], [3.2, -0.4], [2.0, 8 / 3], [-2 / 3, 4 / 3]], dtype=torch.float64
    )
    torch.testing.assert_close(routing.affinity, expected)
    assert routing.expert_ids.tolist() == [[0], [0], [1], [1]]
    assert h.argmax(1).tolist() == [1, 0, 0, 1]  # what the plain router would have chosen


def test_an_adaptive_layer_emits_the_spread_of_its_tokens_before_rescaling():
    torch.manual_seed(0)
    config = AdaptiveConfig(statistics="batch")
    moe = MoE(dim=3, hidden=4, num_experts=3, top_k=1, router=config).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    before = some_state(12, 3, 3, seed=3)
    _, after = moe(x, before)
    chosen = moe.router(x, before).affinity.argmax(1)
    assert torch.equal(after.assignment[:, 0], chosen)
    wanted = scales(dispersion(rows(x), chosen.tolist(), 3), 3)
    torch.testing.assert_close(after.scale, matrix(wanted), rtol=1e-9, atol=1e-10)


def test_a_token_with_several_clusters_gets_their_mean_scale():
    # alpha = (0.75, 0.25), M_2 = (2, 0), M_0 = (0, 4): M = (1.5, 1).
    router = build(AdaptiveConfig(statistics="batch", mix=2), dim=2, num_experts=3)
    scale = torch.tensor([[0.0, 4.0], [9.0, 9.0], [2.0, 0.0]])
    state = RoutingState(
        torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]]), scale, torch.zeros(())
    )
    assert router.rescale(torch.tensor([[10.0, 10.0]]), state).dense().tolist() == [[15.0, 10.0]]


def test_the_experts_see_the_token_itself_unless_asked_otherwise():
    for scale_experts in (False, True):
        config = AdaptiveConfig(statistics="batch", scale_experts=scale_experts)
        torch.manual_seed(0)
        moe = MoE(dim=6, hidden=5, num_experts=4, top_k=4, router=config, bias=False).double()
        state = some_state(7, 4, 6, seed=1)
        x = torch.randn(7, 6, dtype=torch.float64)
        scaled = moe.router.rescale(x, state).dense()
        routing = moe.router(x, state)
        source = scaled if scale_experts else x
        wanted = torch.zeros(7, 6, dtype=torch.float64)
        for token in range(7):
            for expert, gate in zip(routing.expert_ids[token], routing.gate[token], strict=True):
                hidden = (moe.experts.up[expert] @ source[token]).relu()
                wanted[token] += gate * (moe.experts.down[expert] @ hidden)
        torch.testing.assert_close(moe(x, state)[0], wanted)


def test_causality_is_declared_for_the_statistics_that_have_it():
    for mode, causal in (
        ("running", True),
        ("prefix", True),
        ("batch", False),
        ("sequence", False),
    ):
        assert build(AdaptiveConfig(statistics=mode)).causal is causal
    switched = build(AdaptiveConfig(statistics="batch", eval_statistics="running"))
    assert switched.causal is False
    assert switched.eval().causal is True
    assert build(AdaptiveConfig(base=ExpertChoiceConfig())).causal is False
    assert build(RandomConfig()).causal is True


def test_presets_are_reachable_from_the_router_and_can_be_changed_field_by_field():
    paper = AdaptiveRouter.preset("paper")
    assert (paper.statistics, paper.reads, paper.normalize) == ("batch", "previous", "cluster")
    assert (paper.scale_experts, paper.detach, paper.strength) == (False, True, None)
    assert dataclasses.replace(paper, mix=2).mix == 2
