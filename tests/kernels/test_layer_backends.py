"""Two MoE layers and two optimizer steps, on the kernels and on plain PyTorch."""

import copy
import itertools

import pytest
import torch
from layer_cases import NOISY_NAME, ROUTERS, B, D, E, L, built

import acmoe
from acmoe.ops.dispatch import use_backend
from acmoe.ops.sort.order import TokenOrder

QUICK = (
    "noisy, full experts, unit embeddings, selection bias, running, current",
    "two clusters mixed",
    "prefix",
    "sequence",
)
SORTED = [name for name in ROUTERS if name.endswith(("previous", "current", "prefix", "sequence"))]
QUICK_SORTED = [("running, current", True)]
if torch.cuda.is_available():
    QUICK_SORTED.append(("batch, current", False))


def two_steps(layers, x, mask, cotangent, backend):
    """Outputs, gradients and statistics after two forward-backward passes with a fold between.

    And whether the last state carried sorted tokens.
    """
    layers, x = copy.deepcopy(layers), x.clone().requires_grad_()
    torch.manual_seed(1)  # of the noise
    mix = max(layer.router.mix for layer in layers)
    with use_backend(backend):
        for _ in range(2):
            layers.zero_grad()
            x.grad = None
            h = x
            state = acmoe.RoutingState.identity(
                num_tokens=B * L, num_clusters=E, dim=D, mix=mix, device=x.device
            )
            for layer in layers:
                y, state = layer(h, state, token_mask=mask)
                h = h + y
            ((h * cotangent).sum() + state.aux_loss).backward()
            acmoe.fold_statistics(layers)
    assert x.grad is not None
    results = {"output": h.detach(), "input": x.grad, "aux": state.aux_loss.detach()}
    results |= {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
    return results | dict(layers.named_buffers()), state.order.numel() > 0


def compare(layers, x, mask, cotangent):
    """Equal on both; whether the kernels sorted tokens by cluster."""
    right, _ = two_steps(layers, x, mask, cotangent, "torch")
    found, was_sorted = two_steps(layers, x, mask, cotangent, "triton")
    assert found.keys() == right.keys()
    for key in right:
        real = mask if mask is not None and right[key].shape[:2] == (B, L) else ...
        # The interpreter truncates bf16 splits where a GPU rounds: 1.5e-5 on statistics.
        torch.testing.assert_close(found[key][real], right[key][real], rtol=2e-3, atol=2e-4)
    return was_sorted


@pytest.mark.parametrize(
    "name",
    [
        # Other routers have these parts, too.
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in ROUTERS
    ],
)
def test_a_layer_computes_the_same_on_its_kernels(name, device, products_by_torch):
    layers = built(name, device)
    x, cotangent = torch.randn(2, B, L, D, device=device)
    mask = torch.rand(B, L, device=device) > 0.2
    x[~mask] = float("nan")
    # 18 tokens are too few to sort.
    assert not compare(layers, x, mask, cotangent.masked_fill(~mask[..., None], 0.0))


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK_SORTED))
        for case in itertools.product(SORTED, (False, True))
    ],
)
def test_a_layer_whose_tokens_are_sorted_by_cluster_computes_the_same(
    name, masked, device, monkeypatch, products_by_torch
):
    monkeypatch.setattr("acmoe.routing.next_state.worth_sorting", lambda tokens, clusters: True)
    layers = built(name, device)
    x, cotangent = torch.randn(2, B, L, D, device=device)
    mask = torch.rand(B, L, device=device) > 0.2 if masked else None
    if mask is not None:
        cotangent = cotangent.masked_fill(~mask[..., None], 0.0)
    # Under a mask statistics are taken of sorted tokens, and none are handed on.
    assert compare(layers, x, mask, cotangent) == (not masked)


@pytest.mark.parametrize("name", [name for name in ROUTERS if "noisy" in name or "bias" in name])
def test_noise_biases_and_unit_embeddings_do_not_keep_a_router_from_its_kernel(
    name, device, monkeypatch
):
    from acmoe.ops.route.triton import route as affinity

    calls, route = [], affinity.route

    def counted(*arguments, **options):
        calls.append(arguments)
        return route(*arguments, **options)

    monkeypatch.setattr(affinity, "route", counted)
    router = built(name, device)[1].router
    state = acmoe.RoutingState.identity(num_tokens=L, num_clusters=E, dim=D, device=device)
    with use_backend("triton"):
        routing = router(torch.randn(L, D, device=device), state)
    assert len(calls) == 1
    assert torch.equal(routing.first, routing.affinity.argmax(-1))


def test_a_token_that_found_its_expert_full_is_in_the_cluster_it_chose_under_noise(
    device, monkeypatch, products_by_torch
):
    monkeypatch.setattr("acmoe.routing.next_state.worth_sorting", lambda tokens, clusters: True)
    layer = built(NOISY_NAME, device, top_k=1)[0]
    x = torch.randn(B * L, D, device=device)
    identity = acmoe.RoutingState.identity(num_tokens=B * L, num_clusters=E, dim=D, device=device)
    states = {}
    for backend in ("torch", "triton"):
        torch.manual_seed(1)
        with use_backend(backend):
            y, states[backend] = layer(x, identity)
    # 18 tokens, 5 experts of floor(0.75 * ceil(18 / 5)) = 3 rows: 3 tokens at least are dropped.
    assert (y == 0).all(-1).sum() >= 3
    torch.manual_seed(1)
    clean = x @ layer.router.base.embedding.T
    noisy = clean + torch.randn(B * L, E, device=device) / E
    first = noisy.argmax(-1)
    assert not torch.equal(first, clean.argmax(-1))
    assert all(torch.equal(state.assignment[:, 0], first) for state in states.values())
    clusters = TokenOrder.unpack(states["triton"].order, E)
    for c in range(E):
        members = clusters.token[clusters.begin[c] : clusters.end[c]].long()
        assert torch.equal(members, (first == c).nonzero()[:, 0])


def test_a_layer_computes_the_same_with_its_products_by_kernels_too(device, monkeypatch):
    monkeypatch.setattr("acmoe.routing.next_state.worth_sorting", lambda tokens, clusters: True)
    x, cotangent = torch.randn(2, B, L, D, device=device)
    assert compare(built("batch, previous", device), x, None, cotangent)
