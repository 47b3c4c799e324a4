"""The plain top-k router: against a loop over scalars, and what it may never do.

T tokens, D features, E experts, K experts per token.
"""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from router_loops import dot, matrix, rows, top_k_gate

from acmoe import LossConfig, RoutingState, SMoEConfig, build_router, fold_statistics


def identity(num_tokens, router):
    return RoutingState.identity(
        num_tokens=num_tokens, num_clusters=router.num_experts, dim=router.dim, mix=router.mix
    )


def build(config, *, dim=6, num_experts=4, top_k=2, seed=0, **losses):
    torch.manual_seed(seed)
    weights = LossConfig(**losses) if losses else LossConfig(balance=0.0)
    return build_router(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=weights)


@given(
    num_tokens=st.integers(1, 8),
    dim=st.integers(1, 5),
    num_experts=st.integers(1, 5),
    top_k=st.integers(1, 5),
    gate=st.sampled_from(["selected", "all"]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_router_equals_a_loop_over_scalars_with_its_gradients(
    num_tokens, dim, num_experts, top_k, gate, bias, seed
):
    top_k = min(top_k, num_experts)
    config = SMoEConfig(gate=gate, bias=bias)
    router = build(config, dim=dim, num_experts=num_experts, top_k=top_k, seed=seed).double()
    x = torch.randn(num_tokens, dim, dtype=torch.float64, requires_grad=True)
    found = router(x, identity(num_tokens, router))

    parameters = [x, *router.parameters()]
    leaves = [value.detach().clone().requires_grad_() for value in parameters]
    embedding = rows(leaves[1])
    affinity = [[dot(row, e) for e in embedding] for row in rows(leaves[0])]
    if bias:
        affinity = [[row[e] + leaves[2][e] for e in range(num_experts)] for row in affinity]
    ids, gates = top_k_gate(affinity, top_k, gate)

    assert found.expert_ids.tolist() == ids
    torch.testing.assert_close(found.affinity, matrix(affinity), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.gate, matrix(gates), rtol=1e-12, atol=1e-12)
    weight = torch.randn(num_tokens, top_k, dtype=torch.float64)
    got = torch.autograd.grad((found.gate * weight).sum(), parameters)
    wanted = torch.autograd.grad((matrix(gates) * weight).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_with_one_expert_per_token_the_gate_is_the_full_softmax_by_default():
    router = build(SMoEConfig(), top_k=1)
    routing = router(torch.randn(5, 6), identity(5, router))
    expected = routing.affinity.softmax(-1).amax(-1, keepdim=True)
    torch.testing.assert_close(routing.gate, expected)
    assert torch.autograd.grad(routing.gate.sum(), router.embedding)[0].abs().max() > 0


def test_with_two_experts_per_token_the_gates_sum_to_one_by_default():
    router = build(SMoEConfig(), top_k=2)
    gate = router(torch.randn(5, 6), identity(5, router)).gate
    torch.testing.assert_close(gate.sum(-1), torch.ones(5))


def test_a_gate_over_one_selected_expert_is_one_and_teaches_the_router_nothing():
    router = build(SMoEConfig(gate="selected"), top_k=1)
    gate = router(torch.randn(5, 6), identity(5, router)).gate
    assert torch.equal(gate, torch.ones(5, 1))
    assert torch.autograd.grad(gate.sum(), router.embedding)[0].abs().max() == 0


def test_unit_length_embeddings_do_not_see_the_length_of_an_embedding():
    router = build(SMoEConfig(normalize_embeddings=True))
    x = torch.randn(7, 6)
    before = router(x, identity(7, router)).affinity
    with torch.no_grad():
        router.embedding.mul_(torch.tensor([[2.0], [0.5], [10.0], [3.0]]))
    torch.testing.assert_close(router(x, identity(7, router)).affinity, before)
    unit = router.embedding / router.embedding.norm(dim=1, keepdim=True)
    torch.testing.assert_close(before, x @ unit.T)


def test_embeddings_start_within_their_stated_bounds():
    uniform = build(SMoEConfig(bias=True), dim=64, num_experts=32).embedding
    assert uniform.abs().max() <= 1 / 8
    assert uniform.abs().max() > 0.9 / 8
    orthogonal = build(SMoEConfig(init="orthogonal"), dim=64, num_experts=32).embedding
    torch.testing.assert_close(orthogonal @ orthogonal.T, 0.32**2 * torch.eye(32))


def test_noise_is_drawn_in_training_only():
    router = build(SMoEConfig(noise=1.0))
    x = torch.randn(9, 6)
    state = identity(9, router)
    first, second = router(x, state).affinity, router(x, state).affinity
    assert not torch.equal(first, second)
    router.eval()
    assert torch.equal(router(x, state).affinity, router(x, state).affinity)
    assert torch.equal(router(x, state).affinity, x @ router.embedding.T)


def test_noise_is_one_draw_for_each_token_and_expert():
    # noise = 2 and E = 4: deviation 1/2.
    router = build(SMoEConfig(noise=2.0))
    x = torch.randn(9, 6)
    torch.manual_seed(5)
    found = router(x, identity(9, router)).affinity
    torch.manual_seed(5)
    assert torch.equal(found, x @ router.embedding.T + torch.randn(9, 4) / 2)


def test_the_choice_under_noise_is_the_one_that_forms_clusters():
    router = build(SMoEConfig(noise=4.0))
    x = torch.randn(200, 6)
    routing = router(x, identity(200, router))
    assert torch.equal(routing.affinity.argmax(1), routing.expert_ids[:, 0])
    assert not torch.equal(routing.expert_ids[:, 0], (x @ router.embedding.T).argmax(1))


def test_noise_has_the_deviation_stated_in_units_of_one_over_experts():
    # noise = 1 and E = 4: std 0.25. 40000 draws: the estimate's own deviation is 0.25/sqrt(80000).
    router = build(SMoEConfig(noise=1.0))
    noise = router(torch.zeros(10_000, 6), identity(10_000, router)).affinity
    assert noise.mean().abs() < 5 * 0.25 / math.sqrt(40_000)
    assert abs(noise.std().item() - 0.25) < 5 * 0.25 / math.sqrt(80_000)


def test_decisions_are_taken_in_float32_for_bfloat16_tokens():
    router = build(SMoEConfig()).bfloat16()
    x = torch.randn(11, 6).bfloat16()
    routing = router(x, identity(11, router))
    expected = x.float() @ router.embedding.float().T
    assert routing.affinity.dtype == torch.float32
    assert torch.equal(routing.affinity, expected)
    assert torch.equal(routing.expert_ids, expected.topk(2).indices)


@pytest.mark.parametrize("config", [SMoEConfig(), SMoEConfig(bias=True, gate="all")])
def test_sequences_and_flat_tokens_are_routed_alike(config):
    router = build(config)
    x = torch.randn(2, 5, 6)
    folded = router(x, identity(10, router))
    flat = router(x.flatten(0, 1), identity(10, router))
    assert torch.equal(folded.expert_ids, flat.expert_ids)
    for a, b in zip(folded[:4], flat[:4], strict=True):
        torch.testing.assert_close(a, b)


def skewed_tokens(num_tokens=256):
    """Tokens that lean towards the first two of four axes, for a router of unit embeddings."""
    generator = torch.Generator().manual_seed(3)
    lean = torch.tensor([1.5, 0.7, 0.0, -0.4])
    return torch.randn(num_tokens, 4, generator=generator) + lean


def axis_router(**options):
    router = build(SMoEConfig(**options), dim=4, num_experts=4, top_k=1)
    with torch.no_grad():
        router.embedding.copy_(torch.eye(4))
    return router


def test_loss_free_bias_moves_a_skewed_stream_towards_balance():
    router = axis_router(bias_balancing=0.02)
    x = skewed_tokens()
    loads = []
    for _ in range(60):
        expert_ids = router(x, identity(256, router)).expert_ids
        loads.append(torch.bincount(expert_ids.flatten(), minlength=4))
        fold_statistics(router)
    assert loads[0].max() > 120  # more than twice the fair share of 64
    assert loads[-1].max() < 80
    assert loads[-1].min() > 48


def test_loss_free_bias_takes_one_step_up_for_the_poor_and_one_down_for_the_rich():
    router = axis_router(bias_balancing=0.25)
    # Loads (3, 1, 0, 0), mean 1: the first is above, the second at, the others below the mean.
    x = torch.eye(4)[[0, 0, 0, 1]]
    router(x, identity(4, router))
    fold_statistics(router)
    assert router.selection.bias.tolist() == [-0.25, 0.0, 0.25, 0.25]
    fold_statistics(router)  # nothing was routed since: nothing to correct
    assert router.selection.bias.tolist() == [-0.25, 0.0, 0.25, 0.25]


def test_loss_free_bias_never_enters_the_gate_or_its_gradient():
    biased = axis_router(bias_balancing=0.1)
    plain = copy.deepcopy(biased)
    biased.selection.bias.copy_(torch.tensor([-5.0, 0.0, 0.0, 5.0]))
    x = skewed_tokens(32)
    found = biased(x, identity(32, biased))
    assert (found.expert_ids == 3).all()  # the bias decides
    every = plain(x, identity(32, plain)).affinity.softmax(-1)
    assert torch.equal(found.gate, every[:, 3:])  # the gate does not know of it
    got = torch.autograd.grad(found.gate.sum(), biased.embedding)[0]
    assert torch.equal(got, torch.autograd.grad(every[:, 3].sum(), plain.embedding)[0])


def test_loss_free_bias_learns_from_training_alone():
    router = axis_router(bias_balancing=0.1).eval()
    router(skewed_tokens(), identity(256, router))
    fold_statistics(router)
    assert torch.equal(router.selection.bias, torch.zeros(4))


def test_padding_does_not_count_as_load_of_the_bias():
    router = axis_router(bias_balancing=0.1)
    mask = torch.tensor([True, False, False])
    router(torch.eye(4)[[2, 0, 0]], identity(3, router), token_mask=mask)
    assert router.selection.last_load.tolist() == [0, 0, 1, 0]
