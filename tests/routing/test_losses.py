"""The auxiliary losses where their value is known in closed form.

T tokens, E experts, K experts per token.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe import LossConfig, RoutingState, SMoEConfig, build_router
from acmoe.routing.losses import (
    balance_loss,
    distillation_loss,
    importance_loss,
    load,
    load_loss,
    stable_balance_loss,
    z_loss,
)


def phi(value):
    """The normal distribution function."""
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balance_loss_is_one_at_perfect_balance(top_k):
    # Token t goes to experts t, t+1, ... (mod E); affinities are a circulant matrix, so that every
    # expert has the same mean gate: E * sum (1/E)(1/E) = 1.
    experts = 4
    ids = (torch.arange(experts)[:, None] + torch.arange(top_k)) % experts
    affinity = torch.stack([draws(experts).roll(t) for t in range(experts)])
    assert balance_loss(affinity, ids).item() == pytest.approx(1.0)
    assert balance_loss(affinity, ids, temperature=0.3).item() == pytest.approx(1.0)


def test_the_balance_loss_of_all_tokens_to_one_expert_is_that_experts_gate_times_experts():
    # f = (1, 0, 0, 0). Certain gates: P = (1, 0, 0, 0), the loss is E = 4.
    # Affinities (ln 3, 0, 0, 0): P_0 = 3 / 6, the loss is 4 * 1/2 = 2; at temperature 0.5 the gate
    # is softmax(2 ln 3, 0, 0, 0): 9 / 12, the loss is 3.
    ids = torch.zeros(5, 1, dtype=torch.int64)
    certain = torch.tensor([[100.0, 0, 0, 0]]).expand(5, 4)
    assert balance_loss(certain, ids).item() == pytest.approx(4.0)
    leaning = torch.tensor([[math.log(3), 0, 0, 0]]).expand(5, 4)
    assert balance_loss(leaning, ids).item() == pytest.approx(2.0)
    assert balance_loss(leaning, ids, temperature=0.5).item() == pytest.approx(3.0)


def test_dropped_rows_have_no_share_in_the_balance_loss():
    # Two experts, id 2 means none: rows 0, 0, 1 of three tokens, so f = (2/3, 1/3); gates 1/2.
    ids = torch.tensor([[0, 2], [0, 2], [1, 2]])
    assert load(ids, 2).tolist() == [2, 1]
    assert balance_loss(torch.zeros(3, 2), ids).item() == pytest.approx(1.0)


def test_the_z_loss_of_zeros_is_the_squared_logarithm_of_experts():
    assert z_loss(torch.zeros(7, 5)).item() == pytest.approx(math.log(5) ** 2)
    # logsumexp(ln 2, ln 6) = ln 8.
    assert z_loss(torch.tensor([[2.0, 6.0]]).log()).item() == pytest.approx(math.log(8) ** 2)


def test_importance_and_load_vanish_at_balance():
    affinity = torch.stack([draws(4).roll(t) for t in range(4)])
    assert importance_loss(affinity).item() == pytest.approx(0.0, abs=1e-12)
    assert load_loss(affinity, affinity, 2, 0.25).item() == pytest.approx(0.0, abs=1e-12)


def test_importance_by_hand():
    # Gates (3/4, 1/4) and (3/4, 1/4): sums (1.5, 0.5), mean 1, unbiased variance 0.5.
    affinity = torch.tensor([[math.log(3), 0.0]] * 2)
    assert importance_loss(affinity).item() == pytest.approx(0.5)


def test_load_by_hand_in_both_forms():
    # Clean affinities (1, 0), noisy (0.8, 0.1), k = 1, deviation 0.5: the threshold is 0.8.
    # Chances Phi((1 - 0.8) / 0.5), Phi((0 - 0.8) / 0.5); Tutel puts probabilities in their place.
    clean, noisy = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.8, 0.1]])
    gate = 1 / (1 + math.exp(-1))
    for tutel, (a, b) in ((False, (1.0, 0.0)), (True, (gate, 1 - gate))):
        chances = [phi((value - 0.8) / 0.5) for value in (a, b)]
        mean = sum(chances) / 2
        variance = sum((value - mean) ** 2 for value in chances)  # divided by n - 1 = 1
        found = load_loss(clean, noisy, 1, 0.5, tutel=tutel).item()
        assert found == pytest.approx(variance / mean**2, rel=1e-5)


def test_load_with_its_threshold_given_is_the_same_with_the_same_gradient():
    clean, noisy = draws(20, 4).requires_grad_(), draws(20, 4, seed=1).requires_grad_()
    searched = load_loss(clean, noisy, 3, 0.5)
    last = noisy.sort(dim=1, descending=True).indices[:, 2:3]
    given_it = load_loss(clean, noisy, 3, 0.5, kth_T1=noisy.gather(1, last))
    assert torch.equal(given_it, searched)
    slopes = [torch.autograd.grad(loss, [clean, noisy]) for loss in (given_it, searched)]
    assert all(torch.equal(*pair) for pair in zip(*slopes, strict=True))
    assert load_loss(clean, noisy, 3, 0.5, kth_T1=noisy[:, :1]) != searched  # it is what is read


def test_tutels_load_loss_differs_from_the_consistent_one():
    affinity, noisy = draws(20, 4), draws(20, 4, seed=1)
    plain = load_loss(affinity, noisy, 2, 0.25)
    assert load_loss(affinity, noisy, 2, 0.25, tutel=True).item() != pytest.approx(plain.item())


def test_one_expert_alone_has_no_variation():
    affinity = draws(3, 1).requires_grad_()
    total = importance_loss(affinity) + load_loss(affinity, affinity, 1, 0.5)
    assert total == 0
    assert torch.autograd.grad(total, affinity)[0].abs().max() == 0


def test_stable_balance_by_hand():
    # Experts 0, 0, 0, 1 of two: loads (3, 1), mean 2, surplus (1/2, -1/2); scores 0: sigmoid 1/2.
    # (3 * 1/2 * 1/2 - 1/2 * 1/2) / 4 = 1/8.
    loss = stable_balance_loss(torch.zeros(4), torch.tensor([0, 0, 0, 1]), 2)
    assert loss.item() == pytest.approx(1 / 8)
    assert stable_balance_loss(torch.ones(4), torch.tensor([0, 1, 0, 1]), 2).item() == 0


LOSSES = {
    "balance": lambda a, n, ids, mask: balance_loss(a, ids, mask),
    "z": lambda a, n, ids, mask: z_loss(a, mask),
    "importance": lambda a, n, ids, mask: importance_loss(a, mask),
    "load": lambda a, n, ids, mask: load_loss(a, n, 2, 0.5, mask),
    "load-tutel": lambda a, n, ids, mask: load_loss(a, n, 2, 0.5, mask, tutel=True),
    "stable": lambda a, n, ids, mask: stable_balance_loss(a[:, 0], ids[:, 0], 4, mask),
    "distill": lambda a, n, ids, mask: distillation_loss(a, ids[:, 0], mask),
}


@pytest.mark.parametrize("name", LOSSES)
@given(real=st.integers(2, 9), padding=st.integers(0, 4), seed=st.integers(0, 99))
def test_masked_tokens_change_no_loss(name, real, padding, seed):
    total = real + padding
    generator = torch.Generator().manual_seed(seed)
    affinity, noisy = draws(total, 4, seed=seed), draws(total, 4, seed=seed + 1000)
    ids = torch.rand(total, 4, generator=generator).argsort(1)[:, :2]
    keep = torch.randperm(total, generator=generator)[:real].sort().values
    mask = torch.zeros(total, dtype=torch.bool).index_fill(0, keep, True)
    with_mask = LOSSES[name](affinity, noisy, ids, mask)
    alone = LOSSES[name](affinity[keep], noisy[keep], ids[keep], None)
    torch.testing.assert_close(with_mask, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, torch.tensor([True, True, False, True, False, True])])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_the_losses_are_their_slopes(name, mask):
    affinity = draws(6, 4).requires_grad_()
    noisy = affinity.detach() + 0.1 * draws(6, 4, seed=1)
    ids = affinity.detach().topk(2).indices
    assert torch.autograd.gradcheck(lambda a: LOSSES[name](a, noisy, ids, mask), affinity)


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_at_all_give_a_finite_loss(name):
    empty = torch.zeros(0, 4, requires_grad=True)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    assert LOSSES[name](empty, empty, ids, None).item() == 0
    some, ids = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 2, dtype=torch.int64)
    loss = LOSSES[name](some, some, ids, torch.zeros(3, dtype=torch.bool))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, some)[0].abs().max() == 0


@pytest.mark.parametrize("bias_balancing", [0.0, 0.1])
def test_a_noisy_router_compares_with_its_k_th_noisy_affinity(bias_balancing):
    """Not with that of its last choice, where a selection bias chose."""
    torch.manual_seed(0)
    router = build_router(
        SMoEConfig(noise=1.0, bias_balancing=bias_balancing),
        dim=5,
        num_experts=4,
        top_k=2,
        losses=LossConfig(balance=0.0, importance_load=2.0),
    )
    if router.selection is not None:
        router.selection.bias.copy_(torch.tensor([1.0, 0.0, 0.0, -1.0]))
    x = torch.randn(9, 5)
    routing = router(x, RoutingState.identity(num_tokens=9, num_clusters=4, dim=5))
    clean = x @ router.embedding.T
    expected = importance_loss(clean) + load_loss(clean, routing.affinity, 2, 0.25)
    torch.testing.assert_close(routing.loss, expected)
    best = routing.affinity.topk(2).indices
    assert torch.equal(routing.expert_ids, best) == (router.selection is None)


def test_a_router_adds_each_loss_with_its_weight():
    weights = {"balance": 0.5, "z": 0.25, "importance_load": 2.0}
    torch.manual_seed(0)
    router = build_router(
        SMoEConfig(noise=1.0, balance_temperature=0.3),
        dim=5,
        num_experts=4,
        top_k=2,
        losses=LossConfig(**weights),
    ).eval()
    x = torch.randn(9, 5)
    routing = router(x, RoutingState.identity(num_tokens=9, num_clusters=4, dim=5))
    a, ids = routing.affinity, routing.expert_ids
    expected = (
        0.5 * balance_loss(a, ids, temperature=0.3)
        + 0.25 * z_loss(a)
        + 2.0 * (importance_loss(a) + load_loss(a, a, 2, 0.25)) / 2
    )
    torch.testing.assert_close(routing.loss, expected)
    router.losses = LossConfig(balance=0.0)
    assert router(x, RoutingState.identity(num_tokens=9, num_clusters=4, dim=5)).loss == 0
