"""Threshold routing, which the paper calls top-p: fixed and learned.

T tokens, D features, E experts, K places for chosen experts.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from router_loops import dot, rows, softmax

from acmoe import LossConfig, RoutingState, ThresholdConfig, build_router


def build(*, dim=4, num_experts=4, seed=0, **options):
    torch.manual_seed(seed)
    losses = LossConfig(balance=0.0)
    config = ThresholdConfig(**options)
    return build_router(config, dim=dim, num_experts=num_experts, top_k=1, losses=losses)


def route(router, x, **arguments):
    state = RoutingState.identity(
        num_tokens=len(x), num_clusters=router.num_experts, dim=router.dim
    )
    return router(x, state, **arguments)


def with_probabilities(probabilities, **options):
    """A router for x = eye rows whose softmax affinities are exactly these rows."""
    table = torch.tensor(probabilities, dtype=torch.float64)
    router = build(dim=len(table), num_experts=table.shape[1], **options).double()
    with torch.no_grad():
        router.embedding.copy_(table.log().T)
    return router, torch.eye(len(table), dtype=torch.float64)


@given(
    num_tokens=st.integers(1, 8),
    num_experts=st.integers(1, 6),
    threshold=st.sampled_from([0.01, 0.05, 0.2, 0.34, 0.5, 0.9]),
    learnable=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_exactly_the_experts_above_p_and_the_first_are_chosen(
    num_tokens, num_experts, threshold, learnable, bias, seed
):
    router = build(
        num_experts=num_experts, threshold=threshold, learnable=learnable, bias=bias, seed=seed
    ).double()
    with torch.no_grad():
        router.embedding.mul_(4)  # spread the probabilities
        if bias:
            router.bias.normal_()
    x = torch.randn(num_tokens, 4, dtype=torch.float64)
    routing = route(router, x)
    for t, token in enumerate(rows(x)):
        affinity = [dot(token, e) for e in rows(router.embedding.detach())]
        affinity = [a + router.bias[e].detach() if bias else a for e, a in enumerate(affinity)]
        gate = [value.item() for value in softmax(affinity)]
        first = max(range(num_experts), key=lambda e: gate[e])
        chosen = {e for e in range(num_experts) if gate[e] > threshold} | {first}
        total = sum(gate[e] for e in chosen)
        wanted = {e: gate[e] / total for e in chosen}
        found = {
            e: g
            for e, g in zip(routing.expert_ids[t].tolist(), routing.gate[t].tolist(), strict=True)
            if e < num_experts
        }
        assert found == pytest.approx(wanted, rel=1e-9)
        inactive = routing.expert_ids[t] == num_experts
        assert (routing.gate[t][inactive] == 0).all()


def test_the_mean_number_of_active_experts_follows_the_threshold():
    # Rows have 1, 2, 3 and 0 probabilities above 0.2; the first choice of the last is kept.
    router, x = with_probabilities(
        [
            [0.90, 0.05, 0.02, 0.01, 0.01, 0.01],
            [0.50, 0.40, 0.05, 0.02, 0.02, 0.01],
            [0.30, 0.31, 0.32, 0.03, 0.02, 0.02],
            [0.15, 0.17, 0.18, 0.17, 0.17, 0.16],
        ],
        threshold=0.2,
    )
    active = (route(router, x).expert_ids < 6).sum(1)
    assert active.tolist() == [1, 2, 3, 1]


def test_sixteen_equal_experts_are_all_active_at_the_papers_threshold():
    # Softmax over 16 equal affinities is 1/16 = 0.0625, above 0.05.
    router = build(num_experts=16)
    routing = route(router, torch.zeros(3, 4))
    assert routing.expert_ids.shape == (3, 16)
    assert routing.expert_ids.sort(1).values.tolist() == [list(range(16))] * 3
    torch.testing.assert_close(routing.gate, torch.full((3, 16), 1 / 16))


def test_fixed_p_keeps_no_more_places_than_can_exceed_it():
    # Fewer than 1/p probabilities exceed p.
    assert build(num_experts=16, threshold=0.3).places == 3
    assert build(num_experts=16, threshold=0.25).places == 3
    assert build(num_experts=16, threshold=0.9).places == 1
    assert build(num_experts=16, threshold=0.05).places == 16
    assert build(num_experts=16, threshold=0.3, learnable=True).places == 16


def test_a_learned_p_starts_where_the_fixed_one_is_and_chooses_alike():
    fixed = build(num_experts=8, threshold=0.1)
    learned = build(num_experts=8, threshold=0.1, learnable=True)
    assert learned.theta.item() == pytest.approx(math.log(0.1 / 0.9))
    x = torch.randn(20, 4) * 5
    a, b = route(fixed, x), route(learned, x)
    assert torch.equal(a.expert_ids, b.expert_ids[:, : fixed.places])
    torch.testing.assert_close(a.gate, b.gate[:, : fixed.places])


@pytest.mark.parametrize("surrogate", ["sigmoid", "straight-through"])
def test_a_higher_p_takes_from_later_choices_and_gives_to_the_first(surrogate):
    # p = 0.05 (theta = ln(1/19)); gates 0.9, 0.06, 0.04: the first two are active, the third is a
    # near miss. Raising p can only weaken the second expert, so its gate falls with theta.
    router, x = with_probabilities([[0.9, 0.06, 0.04]], learnable=True, surrogate=surrogate)
    gate = route(router, x).gate[0]
    slopes = [torch.autograd.grad(g, router.theta, retain_graph=True)[0].item() for g in gate[:2]]
    assert slopes[0] > 0
    assert slopes[1] < 0


def test_the_straight_through_slope_by_hand():
    # g = (0.6, 0.3, 0.1), p = 0.2: a = (1, 1, 0) with da_1/dp = -1 and S = 0.6 + 0.3 a_1 = 0.9.
    # gate_1 = 0.3 a_1 / S: d/dp = -0.3 / S + 0.3^2 / S^2 = -0.3 * 0.6 / 0.81 = -0.2222...
    # gate_0 = 0.6 / S:     d/dp = +0.6 * 0.3 / 0.81.   dp/dtheta = p (1 - p) = 0.16.
    router, x = with_probabilities(
        [[0.6, 0.3, 0.1]], threshold=0.2, learnable=True, surrogate="straight-through"
    )
    gate = route(router, x).gate[0]
    for value, slope in ((gate[1], -0.18 / 0.81), (gate[0], 0.18 / 0.81)):
        grad = torch.autograd.grad(value, router.theta, retain_graph=True)[0]
        assert grad.item() == pytest.approx(0.16 * slope, rel=1e-6)


def test_the_sigmoid_slope_by_hand_counts_near_misses():
    # g = (0.8, 0.16, 0.04), p = 0.05, width 0.01: a = (1, 1, 0); the slope of the miss is
    # a_2' = -s (1 - s) / 0.01 with s = sigmoid((0.04 - 0.05) / 0.01) = sigmoid(-1).
    # a_1' is the same at sigmoid(11). S = 0.96.
    # gate_0 = 0.8 / S: d/dp = -0.8 / S^2 (0.16 a_1' + 0.04 a_2').
    router, x = with_probabilities([[0.8, 0.16, 0.04]], learnable=True)
    grad = torch.autograd.grad(route(router, x).gate[0, 0], router.theta)[0]

    def slope(margin):
        s = 1 / (1 + math.exp(-margin / 0.01))
        return -s * (1 - s) / 0.01

    moved = 0.16 * slope(0.11) + 0.04 * slope(-0.01)
    assert grad.item() == pytest.approx(0.05 * 0.95 * -0.8 / 0.96**2 * moved, rel=1e-6)


@pytest.mark.parametrize("surrogate", ["sigmoid", "straight-through"])
def test_learning_p_moves_it_towards_a_target_number_of_experts(surrogate):
    # Asking the first expert for all of the gate must raise p until the others fall away.
    router, x = with_probabilities(
        [[0.6, 0.2, 0.2], [0.7, 0.18, 0.12]], threshold=0.1, learnable=True, surrogate=surrogate
    )
    if surrogate == "sigmoid":
        router.config = ThresholdConfig(threshold=0.1, learnable=True, temperature=0.1)
    optimizer = torch.optim.SGD([router.theta], lr=1.0)
    for _ in range(80):
        optimizer.zero_grad()
        (1 - route(router, x).gate[:, 0]).sum().backward()
        optimizer.step()
    assert (route(router, x).expert_ids < 3).sum(1).tolist() == [1, 1]
    assert torch.sigmoid(router.theta) > 0.2


def test_gradients_reach_the_embeddings_through_the_gates():
    router, x = with_probabilities([[0.6, 0.3, 0.1]], threshold=0.2)
    grad = torch.autograd.grad(route(router, x).gate[0, 0], router.embedding)[0]
    # gate_0 = sigmoid(a_0 - a_1): slope gate (1 - gate) = 2/3 * 1/3 up and down, 0 for the third.
    torch.testing.assert_close(
        grad, torch.tensor([[2 / 9], [-2 / 9], [0.0]], dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
