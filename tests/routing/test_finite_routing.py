"""Finite tokens never give a routing that is NaN: huge, equal, crowded and starved ones.

B sequences of L tokens, D features, E experts.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acmoe import AdaptiveConfig, MoE, fold_statistics

DIM, EXPERTS = 6, 4
ADAPTIVE = [
    AdaptiveConfig(statistics=mode, measure=measure)
    for mode in ("batch", "running", "prefix", "sequence")
    for measure in ("mad", "variance")
]
ROUTERS = ["smoe", "cosine", "expert-choice", "threshold", *ADAPTIVE]


def layers_of(router: object, seed: int = 0) -> list[MoE]:
    torch.manual_seed(seed)
    sizes = {"dim": DIM, "hidden": 8, "num_experts": EXPERTS, "top_k": 2}
    return [MoE(**sizes, router=router) for _ in range(2)]  # type: ignore[arg-type]


def check_routing(layers: list[MoE], x_BLD: Tensor) -> None:
    """Route through both layers; every number that a later layer reads is finite."""
    state = None
    for layer in layers:
        routing = layer.router(x_BLD, state)
        assert not routing.affinity.isnan().any()
        assert routing.gate.isfinite().all() and (routing.gate >= 0).all()
        assert ((routing.expert_ids >= 0) & (routing.expert_ids <= EXPERTS)).all()
        _, state = layer(x_BLD, state)
        assert state.scale.isfinite().all() and state.membership.isfinite().all()
        assert state.aux_loss.isfinite()


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_extreme_tokens_are_routed(router: object, train: bool) -> None:
    layers = [layer.train(train) for layer in layers_of(router)]
    x_BLD = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(1))
    one_huge = x_BLD.clone()
    one_huge[0, 3] = 1e30
    constant = x_BLD.clone()
    constant[..., 2] = 1.0
    cases = (x_BLD * 1e30, one_huge, torch.ones(2, 9, DIM), x_BLD * 0, x_BLD * 1e-40, constant)
    for tokens in cases:
        check_routing(layers, tokens)
        for layer in layers:
            fold_statistics(layer)
    check_routing(layers, x_BLD)  # with running statistics of all the cases before


@pytest.mark.parametrize("router", ["smoe", *ADAPTIVE[:4:2]], ids=str)
@given(st.integers(0, 10**6), st.integers(-40, 30), st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_tokens_of_any_size_are_routed(router: object, seed: int, power: int, length: int) -> None:
    layers = layers_of(router, seed % 3)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-3, 1, (1, length, DIM), generator=generator)
    signs = torch.randn(1, length, DIM, generator=generator).clamp(-3, 3)
    check_routing(layers, signs * 10.0**exponents * 10.0 ** min(power, 29))


@pytest.mark.parametrize(
    ("router", "updates"),
    [
        (ADAPTIVE[2], 50),
        *(pytest.param(router, 200, marks=pytest.mark.slow) for router in ("smoe", *ADAPTIVE)),
    ],
    ids=str,
)
def test_one_expert_takes_all_and_the_others_starve(router: object, updates: int) -> None:
    first, second = layers_of(router)
    with torch.no_grad():  # all tokens are near the direction of expert 1, then of expert 2
        for layer in (first, second):
            weight = getattr(layer.router, "base", layer.router).embedding
            weight.zero_()
            weight[1], weight[2] = 100.0, 50.0
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        x_BLD = 1 + 0.1 * torch.randn(1, 8, DIM, generator=generator)
        y_BLD, state = first(x_BLD)
        assert (first.router(x_BLD).expert_ids[:, 0] == 1).all()
        z_BLD, state = second(x_BLD + y_BLD, state)
        (z_BLD.square().mean() + state.aux_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in (first, second):
            fold_statistics(layer)
    assert all(parameter.isfinite().all() for parameter in parameters)
    assert all(b.isfinite().all() for layer in (first, second) for b in layer.buffers())
    for mode in (True, False):
        check_routing([first.train(mode), second.train(mode)], x_BLD)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 6e4), pytest.param(torch.bfloat16, 1e30, marks=pytest.mark.slow)],
)
def test_large_16_bit_tokens_are_routed(dtype: torch.dtype, size: float) -> None:
    # float16 ends at 65,504: the affinity is a sum of products, which only float32 can hold.
    layers = [layer.to(dtype).eval() for layer in layers_of(AdaptiveConfig(statistics="batch"))]
    x_BLD = torch.randn(1, 9, DIM).clamp(-1, 1).mul(size).to(dtype)
    state = None
    for layer in layers:
        routing = layer.router(x_BLD, state)
        assert not routing.affinity.isnan().any() and routing.gate.isfinite().all()
        state = layer(x_BLD, state)[1]
        assert state.scale.isfinite().all()
