"""Low precision stays close and finite; float64 gradients of whole layers are their slopes.

T tokens, D features.
"""

import copy

import pytest
import torch
from moe_stack import DIM, EXPERTS, begin, stack

from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    LossConfig,
    MoE,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    SoftMoE,
    StableConfig,
    ThresholdConfig,
)
from slow_cases import mostly_slow

ROUTERS = {
    "smoe": SMoEConfig(),
    "cosine": CosineConfig(),
    "batch": AdaptiveConfig(statistics="batch"),
    "running": AdaptiveConfig(statistics="running"),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "sequence": AdaptiveConfig(statistics="sequence"),
}


def forward(blocks, x, state):
    for block in blocks:
        x, state = block(x, state)
    return x, state


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_model_is_finite_and_close_to_float32(name, dtype):
    # Weights and input are rounded first, so that both models hold the same numbers; all experts
    # are used, so that no near-tie can send a token elsewhere.
    low = stack(2, router=ROUTERS[name], top_k=EXPERTS).to(dtype)
    full = copy.deepcopy(low).float()
    x = torch.randn(2, 20, DIM).to(dtype)
    results = []
    for blocks, tokens in ((low, x.clone()), (full, x.float())):
        tokens.requires_grad_()
        y, state = forward(blocks, tokens, begin(blocks, tokens))
        assert state.scale.dtype == state.membership.dtype == torch.float32
        (y.float().square().mean() + state.aux_loss).backward()
        grads = [p.grad.float() for p in blocks.parameters() if p.grad is not None]
        results.append([y.float(), state.aux_loss, tokens.grad.float(), *grads])
    assert y.isfinite().all()
    step = torch.finfo(dtype).eps
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() <= 12 * step * b.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_under_autocast_experts_run_in_bfloat16_and_routing_stays_float32(name, inputs):
    blocks = stack(1, router=ROUTERS[name])
    moe = blocks[0].moe
    x = torch.randn(2, 150, DIM).to(inputs)
    state = begin(blocks, x)
    state = state._replace(assignment=torch.randint(EXPERTS, state.assignment.shape))
    wanted = moe.router(x, state)
    plain, emitted = moe(x.float(), state)
    with torch.autocast("cpu", torch.bfloat16):
        found = moe.router(x, state)
        y, told = moe(x, state)
    for a, b in zip(found[:4], wanted[:4], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(told[:4], emitted[:4], strict=True):
        torch.testing.assert_close(a, b)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain, rtol=0.05, atol=0.02)
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in moe.parameters() if p.grad is not None)
    assert moe.experts.up.grad.dtype == torch.float32


def test_soft_layers_keep_their_mixtures_in_float32_under_autocast():
    torch.manual_seed(0)
    config = AdaptiveConfig(base=SoftConfig(), statistics="batch", mix=2)
    moe = SoftMoE(dim=DIM, hidden=8, num_experts=EXPERTS, router=config)
    x = torch.randn(2, 9, DIM)
    state = RoutingState.identity(num_tokens=18, num_clusters=EXPERTS, dim=DIM, mix=2)
    plain, emitted = moe(x, state)
    with torch.autocast("cpu", torch.bfloat16):
        y, told = moe(x, state)
    for a, b in zip(told[:4], emitted[:4], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(y.float(), plain, rtol=0.05, atol=0.02)


GRADCHECK = {
    "batch": AdaptiveConfig(statistics="batch", detach=False),
    "current": AdaptiveConfig(statistics="batch", statistics_of="current", detach=False, mix=2),
    "variance": AdaptiveConfig(statistics="batch", measure="variance", detach=False, eps=0.1),
    "gini-global": AdaptiveConfig(
        statistics="batch", measure="gini", normalize="global", detach=False
    ),
    "strength": AdaptiveConfig(statistics="batch", strength=0.8, detach=False, clamp=1.3),
    "sequence": AdaptiveConfig(statistics="sequence", measure="std", detach=False),
    "prefix": AdaptiveConfig(statistics="prefix", detach=False),
    "scaled-experts": AdaptiveConfig(statistics="batch", detach=False, scale_experts=True),
    "threshold": AdaptiveConfig(
        statistics="batch", detach=False, base=ThresholdConfig(threshold=0.2)
    ),
}


@mostly_slow("name", GRADCHECK, keep=(1, 4, 6))
def test_gradients_of_two_whole_layers_are_their_slopes(name):
    torch.manual_seed(0)
    config = GRADCHECK[name]
    size = {"dim": 3, "hidden": 4, "num_experts": 3, "top_k": 2, "activation": "gelu"}
    losses = LossConfig(balance=0.5, z=0.1)
    layers = [MoE(**size, router=config, losses=losses).double() for _ in range(2)]
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)

    def output(tokens, *parameters):
        y, state = (
            tokens,
            RoutingState.identity(
                num_tokens=10, num_clusters=3, dim=3, mix=config.mix, dtype=torch.float64
            ),
        )
        for layer in layers:
            out, state = layer(y, state)
            y = y + out
        return y, state.aux_loss

    # fast_mode: slopes along random directions, one call in place of one for every number.
    parameters = [p for layer in layers for p in layer.parameters()]
    assert torch.autograd.gradcheck(
        output, (x, *parameters), eps=1e-7, atol=1e-6, rtol=1e-4, fast_mode=True
    )


def test_without_detach_the_scale_does_change_the_gradient():
    # A white-box attack must see it: the gradients with and without it differ.
    grads = []
    for detach in (True, False):
        blocks = stack(2, router=AdaptiveConfig(statistics="batch", detach=detach))
        x = torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y, _ = forward(blocks, x, begin(blocks, x))
        grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert (grads[0] - grads[1]).abs().max() > 1e-3


ORTHOGONAL = {
    "smoe": SMoEConfig(init="orthogonal"),
    "cosine": CosineConfig(),
    "stable": StableConfig(vocab_size=10),
}


@pytest.mark.parametrize("router", ORTHOGONAL.values(), ids=ORTHOGONAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_orthogonal_embeddings_may_be_drawn_in_low_precision(router, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        moe = MoE(dim=8, hidden=8, num_experts=4, top_k=1, router=router)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        moe.router.embedding.zero_()
    moe.router.reset_parameters()  # as after `to_empty` of a model on the meta device
    rows = moe.router.embedding.detach()
    assert rows.dtype == dtype
    # Columns where the matrix is tall: 4 experts in 2 projected features (cosine).
    rows = (rows if rows.shape[0] <= rows.shape[1] else rows.T).float()
    wanted = 0.32**2 * torch.eye(len(rows))
    torch.testing.assert_close(rows @ rows.T, wanted, atol=2e-3, rtol=0)
