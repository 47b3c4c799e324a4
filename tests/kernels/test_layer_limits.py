"""A layer on its kernels: ties, tokens that are not finite, and derivatives it does not have."""

import copy

import pytest
import torch
from layer_cases import B, D, E, K, L

import acmoe
from acmoe.errors import UserError
from acmoe.ops.dispatch import use_backend

TIED = {
    "plain": acmoe.SMoEConfig(),
    "all": acmoe.SMoEConfig(gate="all", bias=True),
    "biased": acmoe.SMoEConfig(bias_balancing=0.1),
    "adaptive": acmoe.AdaptiveConfig(statistics="batch"),
    "prefix": acmoe.AdaptiveConfig(base=acmoe.SMoEConfig(bias_balancing=0.1), statistics="prefix"),
    "threshold": acmoe.AdaptiveConfig(
        base=acmoe.ThresholdConfig(threshold=0.2), statistics="batch"
    ),
}


SLOW_TIES = ("prefix", "all", "biased", "threshold")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_TIES)) for name in TIED],
)
def test_equal_affinities_choose_alike_on_every_backend(name, device, generator):
    # Products of integers are exact on every backend, so that ties are ties.
    layer = acmoe.MoE(dim=4, hidden=4, num_experts=E, top_k=K, router=TIED[name]).to(device).eval()
    base = getattr(layer.router, "base", layer.router)
    with torch.no_grad():
        embedding = torch.randint(-1, 2, (E, 4), generator=generator).float()
        embedding[3] = embedding[1]  # a copied expert
        base.embedding.copy_(embedding)
        if base.bias is not None:
            base.bias.copy_(torch.tensor([0.0, -0.0, 1.0, 0.0, 0.0]))
        if getattr(base, "selection", None) is not None:
            base.selection.bias.copy_(torch.tensor([-9.0, 0.0, 0.0, 0.0, 0.0]))
    x = torch.randint(-1, 2, (B, 40, 4), generator=generator).float().to(device)
    x[:, :4] = 0
    begin = acmoe.RoutingState.identity(num_tokens=B * 40, num_clusters=E, dim=4, device=device)
    found = []
    for backend in ("torch", "triton"):
        with use_backend(backend):
            routing = layer.router(x, begin)
            _, state = layer(x, begin)
        found.append((routing.expert_ids, routing.first, state.assignment))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    ids, first, assignment = found[0]
    assert (ids == first[:, None]).any(-1).all()
    adaptive = isinstance(TIED[name], acmoe.AdaptiveConfig)
    assert torch.equal(assignment[:, 0], first if adaptive else torch.full_like(first, -1))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "statistics",
    [
        "batch",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("prefix", "running", "sequence")),
    ],
)
def test_a_token_that_is_not_finite_harms_no_other(statistics, bad, device, generator):
    # `current`: the router scales the very tokens it measures. Token (0, 3) alone is not finite.
    config = acmoe.AdaptiveConfig(statistics=statistics, statistics_of="current")
    fresh = acmoe.MoE(dim=D, hidden=4, num_experts=E, top_k=K, router=config).to(device)
    x = torch.randn(B, L, D, generator=generator).to(device)
    x[0, 3, 1] = bad
    begin = acmoe.RoutingState.identity(num_tokens=B * L, num_clusters=E, dim=D, device=device)
    clusters = torch.arange(B * L, device=device)[:, None] % 2
    begin = begin._replace(assignment=clusters)
    finite = x.isfinite().all(-1)
    outputs = []
    for backend in ("torch", "triton"):
        layer = copy.deepcopy(fresh)
        with use_backend(backend), torch.no_grad():
            y, _ = layer(x, begin)
            acmoe.fold_statistics(layer)
            again, _ = layer.eval()(x, begin)
        assert y[finite].isfinite().all() and again[finite].isfinite().all()
        assert not y[0, 3].isfinite().all()
        outputs.append(torch.stack([y[finite], again[finite]]))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_through_a_kernel_raises(device, generator):
    layer = acmoe.MoE(dim=4, hidden=4, num_experts=E, top_k=K).to(device)
    x = torch.randn(6, 4, generator=generator).to(device).requires_grad_()
    begin = acmoe.RoutingState.identity(num_tokens=6, num_clusters=E, dim=4, device=device)
    with use_backend("triton"):
        y, _ = layer(x, begin)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            (first.square().sum() + x.sum()).backward()


@pytest.mark.parametrize("vectorized", ["autograd", "vmap"])
def test_a_batched_backward_through_a_kernel_says_what_to_do(vectorized, device, generator):
    layer = acmoe.MoE(dim=4, hidden=4, num_experts=E, top_k=K).to(device)
    x = torch.randn(6, 4, generator=generator).to(device).requires_grad_()
    given = torch.randn(2, 6, 4, generator=generator).to(device)

    def batched(y):
        if vectorized == "autograd":
            return torch.autograd.grad(y, x, given, is_grads_batched=True)[0]
        return torch.func.vmap(lambda one: torch.autograd.grad(y, x, one)[0])(given)

    with use_backend("triton"):
        y, _ = layer(x)
    with pytest.raises(UserError, match=r"one gradient at a time, .*; run the forward on"):
        batched(y)
    with use_backend("torch"):
        assert batched(layer(x)[0]).shape == given.shape
