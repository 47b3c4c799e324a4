"""XMoE's cosine router and its published simplification, against loops over scalars.

T tokens, D features, E experts, P projected features.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from router_loops import dot, matrix, rows, top_k_gate

from acmoe import CosineConfig, LossConfig, RoutingState, build_router


def build(config, *, dim=6, num_experts=4, top_k=2, seed=0):
    torch.manual_seed(seed)
    losses = LossConfig(balance=0.0)
    return build_router(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)


def route(router, x):
    return router(
        x, RoutingState.identity(num_tokens=len(x), num_clusters=router.num_experts, dim=router.dim)
    )


@given(
    num_tokens=st.integers(1, 7),
    dim=st.integers(1, 5),
    num_experts=st.integers(1, 5),
    top_k=st.integers(1, 3),
    legacy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_router_equals_a_loop_over_scalars_with_its_gradients(
    num_tokens, dim, num_experts, top_k, legacy, seed
):
    top_k = min(top_k, num_experts)
    config = CosineConfig(legacy=legacy, proj_dim=3, temperature=0.5)
    router = build(config, dim=dim, num_experts=num_experts, top_k=top_k, seed=seed).double()
    x = torch.randn(num_tokens, dim, dtype=torch.float64, requires_grad=True)
    found = route(router, x)

    parameters = [x, router.project, router.embedding]
    parameters += [] if legacy else [router.log_scale]
    leaves = [value.detach().clone().requires_grad_() for value in parameters]
    affinity = []
    for token in rows(leaves[0]):
        u = [dot(token, r) for r in rows(leaves[1])]
        if not legacy:
            length = dot(u, u).sqrt()
            u = [value / length * leaves[3].exp() for value in u]
        affinity.append([dot(u, e) / dot(e, e).sqrt() for e in rows(leaves[2])])
    ids, gates = top_k_gate(affinity, top_k, "all" if top_k == 1 else "selected")
    assert found.expert_ids.tolist() == ids
    torch.testing.assert_close(found.affinity, matrix(affinity), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.gate, matrix(gates), rtol=1e-10, atol=1e-12)
    weight = torch.randn(num_tokens, num_experts, dtype=torch.float64)
    got = torch.autograd.grad((found.affinity * weight).sum(), parameters)
    wanted = torch.autograd.grad((matrix(affinity) * weight).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_affinity_is_a_cosine_over_the_temperature_whatever_the_length_of_a_token():
    router = build(CosineConfig(temperature=0.25))
    x = torch.randn(50, 6)
    affinity = route(router, x).affinity
    assert affinity.abs().max() <= 4 * (1 + 1e-6)
    torch.testing.assert_close(route(router, 100 * x).affinity, affinity)


def test_the_published_form_keeps_the_length_of_a_token_and_has_no_temperature():
    router = build(CosineConfig(legacy=True))
    x = torch.randn(5, 6)
    assert router.log_scale is None
    torch.testing.assert_close(route(router, 3 * x).affinity, 3 * route(router, x).affinity)


def test_the_projection_goes_to_half_as_many_features_as_experts_by_default():
    assert build(CosineConfig(), num_experts=16, dim=32).project.shape == (8, 32)
    assert build(CosineConfig(), num_experts=1, top_k=1).project.shape == (1, 6)


def test_the_learned_scale_is_capped_at_one_hundred():
    router = build(CosineConfig())
    with torch.no_grad():
        router.log_scale.fill_(math.log(1e6))
    assert route(router, torch.randn(20, 6)).affinity.abs().max() <= 100 * (1 + 1e-5)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_token_of_zeros_is_routed_without_nan(legacy):
    router = build(CosineConfig(legacy=legacy))
    x = torch.zeros(3, 6, requires_grad=True)
    routing = route(router, x)
    (routing.gate * torch.tensor([1.0, 2.0])).sum().backward()
    assert routing.gate.isfinite().all()
    assert all(
        parameter.grad.isfinite().all()
        for parameter in router.parameters()
        if parameter.grad is not None
    )
