"""The MoE layer against a double loop over tokens and experts, and at its edges.

T tokens, D features, E experts, K experts per token.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_loops import layer, top_k

from acmoe import (
    AdaptiveConfig,
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    MoE,
    RandomConfig,
    RoutingState,
    SMoEConfig,
    SoftMoE,
    StableConfig,
    ThresholdConfig,
    build_router,
)
from slow_cases import mostly_slow

ROUTERS = [
    SMoEConfig(bias=True),
    "cosine",
    StableConfig(vocab_size=12),
    RandomConfig(),
    ThresholdConfig(threshold=0.3),
    ThresholdConfig(threshold=0.3, learnable=True),
    HashConfig(),
    ExpertChoiceConfig(),
    AdaptiveConfig(statistics="batch"),
    AdaptiveConfig(statistics="running"),
    AdaptiveConfig(statistics="prefix"),
    AdaptiveConfig(statistics="sequence", measure="gini"),
    AdaptiveConfig(statistics="batch", measure="iqr", mix=2, scale_experts=True),
]


def name(router):
    return (
        router if isinstance(router, str) else f"{router.name}-{getattr(router, 'statistics', '')}"
    )


def build(router="smoe", *, dim=6, num_experts=4, top_k=2, seed=0, **options):
    torch.manual_seed(seed)
    size = {"dim": dim, "hidden": 5, "num_experts": num_experts, "top_k": top_k}
    return MoE(**size, router=router, **options)


def begin(moe, num_tokens):
    return RoutingState.identity(
        num_tokens=num_tokens, num_clusters=moe.num_experts, dim=moe.dim, mix=moe.router.mix
    )


@given(
    num_tokens=st.integers(1, 7),
    num_experts=st.integers(1, 5),
    k=st.integers(1, 5),
    activation=st.sampled_from(["relu", "gelu", "swiglu"]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_layer_equals_a_double_loop_with_every_gradient(
    num_tokens, num_experts, k, activation, bias, seed
):
    k = min(k, num_experts)
    moe = build(
        num_experts=num_experts,
        top_k=k,
        seed=seed,
        activation=activation,
        bias=bias,
        losses=LossConfig(balance=0.0),
    ).double()
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.normal_()
    x = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    y, _ = moe(x, begin(moe, num_tokens))
    weight = torch.randn_like(y)

    leaves = {key: p.detach().clone().requires_grad_() for key, p in moe.named_parameters()}
    weights = {key.removeprefix("experts."): p for key, p in leaves.items() if "experts." in key}
    source = x.detach().clone().requires_grad_()
    affinity = torch.stack([leaves["router.embedding"] @ row for row in source])
    ids, gates = top_k(affinity, k, "all" if k == 1 else "selected")
    wanted = layer(source, ids, gates, weights, activation)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-12)
    # With k = E = 1 the gate is constant and the router may stand outside the graph.
    got = torch.autograd.grad((y * weight).sum(), [x, *moe.parameters()], materialize_grads=True)
    expected = torch.autograd.grad(
        (wanted * weight).sum(), [source, *leaves.values()], materialize_grads=True
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def run(moe, x, **arguments):
    """Two layers' worth: the state that the layer returns is read by it again."""
    ids = torch.arange(x[..., 0].numel()).view(x.shape[:-1]) % 12
    y, state = moe(x, begin(moe, x[..., 0].numel()), token_ids=ids, **arguments)
    if state.assignment.shape[1] != moe.router.mix:
        state = begin(moe, x[..., 0].numel())
    z, state = moe(x + y, state, token_ids=ids, **arguments)
    return z, state


@mostly_slow("capacity_factor", [None, 1.0], keep=(1,))
@pytest.mark.parametrize("router", ROUTERS, ids=name)
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (0, 3), (1, 1)])
def test_no_token_and_one_token_pass_forwards_and_backwards(router, shape, capacity_factor):
    moe = build(router, capacity_factor=capacity_factor)
    x = torch.randn(*shape, 6, requires_grad=True)
    y, state = run(moe, x)
    assert y.shape == x.shape
    (y.sum() + state.aux_loss).backward()
    assert x.grad.shape == x.shape
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("router", ROUTERS, ids=name)
def test_equal_inputs_give_equal_bits_forwards_and_backwards(router):
    found = []
    for _ in range(2):
        moe = build(router, num_experts=8, capacity_factor=1.0)
        torch.manual_seed(5)
        x = torch.randn(4, 50, 6, requires_grad=True)
        y, state = run(moe, x)
        weight = torch.randn(4, 50, 6)
        ((y * weight).sum() + state.aux_loss).backward()
        grads = [p.grad for p in moe.parameters() if p.grad is not None]
        found.append([y, *state[:4], x.grad, *grads])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("router", ROUTERS, ids=name)
def test_flat_tokens_are_one_sequence(router):
    results = []
    for shape in ((9, 6), (1, 9, 6)):
        moe = build(router)
        torch.manual_seed(3)
        x = torch.randn(9, 6)
        y, state = run(moe, x.view(shape))
        assert y.shape == shape
        results.append([y.flatten(), *state[:4]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("router", ["smoe", AdaptiveConfig(statistics="batch")], ids=name)
def test_strided_inputs_are_read_as_their_values(router):
    moe = build(router)
    x = torch.randn(6, 5, 3).permute(2, 1, 0)
    mask = (torch.rand(5, 3) < 0.7).T
    y, _ = run(moe, x, token_mask=mask)
    z, _ = run(moe, x.contiguous(), token_mask=mask.contiguous())
    torch.testing.assert_close(y, z)


def test_one_expert_is_a_dense_layer():
    moe = build(num_experts=1, top_k=1).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    weights = {key: p[0] for key, p in moe.experts.named_parameters()}
    hidden = torch.relu(x @ weights["up"].T + weights["up_bias"])
    expected = hidden @ weights["down"].T + weights["down_bias"]
    torch.testing.assert_close(moe(x, begin(moe, 5))[0], expected)


def test_all_experts_at_once_are_their_gated_sum():
    moe = build(top_k=4).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    affinity = x @ moe.router.embedding.T
    gates = affinity.softmax(-1)
    weights = dict(moe.experts.named_parameters())
    wanted = layer(x, [[0, 1, 2, 3]] * 5, gates.tolist(), weights, "relu")
    torch.testing.assert_close(moe(x, begin(moe, 5))[0], wanted)


def test_all_tokens_to_one_expert_leave_the_others_without_gradient():
    moe = build(top_k=1)
    x = torch.rand(9, 6) + 0.1
    with torch.no_grad():
        moe.router.embedding.copy_(-torch.ones(4, 6)).index_fill_(0, torch.tensor([2]), 1.0)
    y, _ = moe(x, begin(moe, 9))
    y.square().sum().backward()
    used = moe.experts.up.grad.abs().sum((1, 2)) > 0
    assert used.tolist() == [False, False, True, False]
    assert y.isfinite().all()


def test_the_auxiliary_loss_is_summed_over_layers():
    moe = build("smoe", losses=LossConfig(balance=1.0, z=0.5))
    x = torch.randn(7, 6)
    once = moe.router(x, begin(moe, 7)).loss
    _, state = moe(x, begin(moe, 7))
    torch.testing.assert_close(state.aux_loss, once)
    _, state = moe(x, state)
    torch.testing.assert_close(state.aux_loss, 2 * once)


def test_a_router_module_stands_in_for_its_config():
    torch.manual_seed(0)
    config = AdaptiveConfig(statistics="batch")
    router = build_router(config, dim=6, num_experts=4, top_k=2)
    moe = MoE(dim=6, hidden=5, num_experts=4, top_k=2, router=router)
    assert moe.router is router
    assert moe.next_state.next_router is config


def test_a_layer_before_a_plain_one_emits_the_identity_and_takes_no_statistics():
    moe = build(AdaptiveConfig(statistics="batch", mix=2), next_router=None)
    assert moe.next_state.statistics is None
    _, state = moe(torch.randn(7, 6), begin(moe, 7))
    assert state.assignment.tolist() == [[-1]] * 7
    assert torch.equal(state.scale, torch.ones(4, 6))


def test_a_plain_layer_emits_for_the_adaptive_one_behind_it():
    config = AdaptiveConfig(statistics="batch", mix=2)
    moe = build("smoe", next_router=config)
    _, state = moe(torch.randn(9, 6), begin(moe, 9))
    assert state.assignment.shape == (9, 2)
    assert not torch.equal(state.scale, torch.ones(4, 6))


@pytest.mark.parametrize("shape", [(7, 6), (2, 5, 6)])
def test_the_output_is_no_view_of_which_a_wrapper_could_lose_its_hook(shape):
    for moe in (build("adaptive"), SoftMoE(dim=6, hidden=4, num_experts=4)):
        y, _ = moe(torch.randn(shape))
        assert y.shape == shape
        assert not y._is_view()
