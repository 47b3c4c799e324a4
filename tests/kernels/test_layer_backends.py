"""Two MoE layers and two optimizer steps, on the kernels and on plain PyTorch."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import acmoe
from acmoe.errors import UserError
from acmoe.experts.mlp import ExpertMLP
from acmoe.lab.variants import VariantConfig
from acmoe.ops.dispatch import use_backend
from acmoe.ops.recompute import recompute
from acmoe.ops.sort.order import TokenOrder, no_order
from slow_cases import mostly_slow

B, L, D, E, K = 2, 9, 20, 5, 2
NOISY = acmoe.SMoEConfig(gate="all", noise=1.0)
NOISY_NAME = "noisy, full experts, batch, previous"
ROUTERS = {
    "plain": acmoe.SMoEConfig(),
    "plain with bias, gate over all": acmoe.SMoEConfig(bias=True, gate="all"),
    "batch, previous": acmoe.AdaptiveConfig(statistics="batch"),
    "running, previous": acmoe.AdaptiveConfig(statistics="running"),
    "batch, current": acmoe.AdaptiveConfig(statistics="batch", statistics_of="current"),
    "running, current": acmoe.AdaptiveConfig(statistics="running", statistics_of="current"),
    "prefix": acmoe.AdaptiveConfig(statistics="prefix"),
    # Swin-MoE: noise, the losses that need it, and a capacity.
    "noisy, full experts": NOISY,
    NOISY_NAME: acmoe.AdaptiveConfig(base=NOISY, statistics="batch"),
    # The kernel's affinities, and a choice by others.
    "unit embeddings, selection bias": acmoe.SMoEConfig(
        normalize_embeddings=True, bias_balancing=0.1
    ),
    "noisy, full experts, unit embeddings, selection bias, running, current": acmoe.AdaptiveConfig(
        base=replace(NOISY, normalize_embeddings=True, bias_balancing=0.1),
        statistics="running",
        statistics_of="current",
    ),
    # Arithmetic on the (C, D) scale, between two kernels.
    "own part, root, matched": VariantConfig(statistics="batch", part="own", power=0.5, match=True),
    # Tokens and embeddings of twice the features.
    "distance in M": VariantConfig(statistics="batch", distance=True),
    # Calls that no kernel serves fall to the reference, inside the same layer.
    "two clusters mixed": acmoe.AdaptiveConfig(statistics="batch", mix=2),
    "centred, learned lambda": VariantConfig(
        statistics="batch", statistics_of="current", center=True, strength=0.5, learn_strength=True
    ),
    "gradient through the scale": acmoe.AdaptiveConfig(statistics="batch", detach=False),
}


QUICK = (
    "noisy, full experts, unit embeddings, selection bias, running, current",
    "two clusters mixed",
)
SORTED = [name for name in ROUTERS if name.endswith(("previous", "current"))]
QUICK_SORTED = (("batch, current", False), ("running, current", True))


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


def built(name, device, *, num_experts=E, top_k=K):
    torch.manual_seed(0)
    noisy = name.startswith("noisy")
    options = {"dim": D, "hidden": 12, "num_experts": num_experts, "top_k": top_k}
    options["capacity_factor"] = 0.75 if noisy else None
    losses = acmoe.LossConfig(balance=0.1, z=0.01, importance_load=0.2 if noisy else 0.0)
    return torch.nn.ModuleList(
        acmoe.MoE(**options, router=ROUTERS[name], losses=losses) for _ in range(2)
    ).to(device)


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


@pytest.fixture
def products_by_torch(monkeypatch):
    """Replace the experts: the interpreter spends most time on them, and no router changes them."""
    forward = ExpertMLP.forward

    def by_torch(*arguments, **options):
        with use_backend("torch"):
            return forward(*arguments, **options)

    if not torch.cuda.is_available():
        monkeypatch.setattr(ExpertMLP, "forward", by_torch)


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
    monkeypatch.setattr(affinity, "route", lambda *given: calls.append(given) or route(*given))
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


def cloned(state):
    return acmoe.RoutingState(*(tensor.clone() for tensor in state))


def mapped(state):
    return pytree.tree_map(torch.clone, state)


def sent(state):
    """To another pipeline stage, which receives plain tensors."""
    flat = [tensor.detach().clone() for tensor in state]
    return acmoe.RoutingState(*flat)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # so does it, of Functions
@pytest.mark.parametrize(
    "way",
    [
        "mapped",
        "checkpointed",
        pytest.param("cloned", marks=pytest.mark.slow),
        pytest.param("sent", marks=pytest.mark.slow),
        pytest.param("compiled layers", marks=pytest.mark.slow),
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
def test_a_state_keeps_results_and_kernels_however_it_travels(
    way, device, monkeypatch, products_by_torch
):
    """Its tokens stay sorted for the next router when a state is cloned, mapped, sent to another
    pipeline stage, recomputed or compiled."""
    monkeypatch.setattr("acmoe.routing.next_state.worth_sorting", lambda tokens, clusters: True)
    from acmoe.ops.device import tape
    from acmoe.ops.route.triton import route as affinity

    seen, route = [], affinity.route

    def watched(tokens, *arguments):
        seen.append(tokens.is_sorted)
        return route(tokens, *arguments)

    monkeypatch.setattr(affinity, "route", watched)
    layers = built("batch, previous", device, num_experts=2, top_k=1)
    x = torch.randn(L, D, device=device, requires_grad=True)

    def run(x, calls, travel=lambda state: state):
        state = acmoe.RoutingState.identity(num_tokens=L, num_clusters=2, dim=D, device=device)
        for call in calls:
            y, state = call(x, travel(state))
            x = x + y
        return x

    def recomputed(layer):
        return lambda x, state: checkpoint(layer, x, state, use_reentrant=False)

    def compiled(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    ways = {
        "cloned": lambda: run(x, layers, cloned),
        "mapped": lambda: run(x, layers, mapped),
        "sent": lambda: run(x, layers, sent),
        "checkpointed": lambda: run(x, [recomputed(layer) for layer in layers]),
        "compiled layers": lambda: run(x, [compiled(layer) for layer in layers]),
        "compiled": lambda: compiled(lambda x: run(x, layers))(x),
    }
    with use_backend("triton"):
        wanted = run(x, layers)
        (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), x)
        tape.forget()  # a repeated launch calls no Python
        seen.clear()
        found = ways[way]()
        assert seen == [False, True]  # the first layer has no sorted tokens before it
        (grad,) = torch.autograd.grad(found.square().sum(), x)
        assert torch.equal(found, wanted)
        torch.testing.assert_close(grad, wanted_grad)


@mostly_slow("name", ["batch, previous", NOISY_NAME])
def test_a_block_computed_again_keeps_the_choices_of_the_kernel(
    name, device, monkeypatch, products_by_torch
):
    from acmoe.ops.route.triton import route as affinity

    calls, route = [], affinity.route

    def counted(*arguments):
        calls.append(arguments)
        return route(*arguments)

    monkeypatch.setattr(affinity, "route", counted)
    layers = built(name, device)
    x = torch.randn(B * L, D, device=device, requires_grad=True)
    identity = acmoe.RoutingState.identity(num_tokens=B * L, num_clusters=E, dim=D, device=device)

    def gradients(call):
        calls.clear()
        torch.manual_seed(1)  # of the noise
        y, state = call(layers[0], x, identity)
        z, state = call(layers[1], x + y, state)
        return torch.autograd.grad(z.square().sum() + state.aux_loss, [x, *layers[1].parameters()])

    with use_backend("triton"):
        plain = gradients(lambda layer, *inputs: layer(*inputs))
        found = gradients(recompute)
    assert len(calls) == 2  # one a layer, none in the backward
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_a_state_is_made_of_tensors_and_a_new_assignment_drops_the_old_order():
    state = acmoe.RoutingState.identity(num_tokens=4, num_clusters=2, dim=3)
    assert all(isinstance(field, torch.Tensor) for field in state)
    assert len(state) == len(state._fields) == 6
    order = torch.arange(3, dtype=torch.int32)
    state = state._replace(order=order)
    assert state._replace(scale=2 * state.scale).order is order
    assert state._replace(assignment=state.assignment + 1).order.numel() == 0
    assert torch.equal(no_order(order), torch.empty(0, dtype=torch.int32))
    mapped_state = pytree.tree_map(torch.clone, state)
    assert type(mapped_state) is acmoe.RoutingState


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
