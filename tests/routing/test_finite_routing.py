"""Finite tokens never give a routing that is NaN: huge, equal, crowded and starved ones.

B sequences of L tokens, D features, E experts.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acmoe import (
    AdaptiveConfig,
    MetricConfig,
    MoE,
    RandomConfig,
    SoftMoE,
    StableConfig,
    fold_statistics,
)
from acmoe.config.routing import LossConfig
from acmoe.ops.statistics.running import update_average
from acmoe.routing.statistics import build_statistics
from slow_cases import mostly_slow

DIM, EXPERTS = 6, 4
ADAPTIVE = [
    AdaptiveConfig(statistics=mode, measure=measure)
    for mode in ("batch", "running", "prefix", "sequence")
    for measure in ("mad", "variance")
]
ROUTERS = [
    *("smoe", "metric", "cosine", "expert-choice", "threshold", "hash", "soft"),
    *(StableConfig(vocab_size=32), RandomConfig(), RandomConfig(mix=2), *ADAPTIVE),
    *(AdaptiveConfig(base=MetricConfig()), AdaptiveConfig(statistics="batch", mix=2)),
]
LOSSES = LossConfig(balance=0.01, z=0.001)  # the z-loss squares affinities


def layers_of(router: object, seed: int = 0) -> list[MoE]:
    torch.manual_seed(seed)
    sizes = {"dim": DIM, "hidden": 8, "num_experts": EXPERTS}
    if router == "soft":
        return [SoftMoE(**sizes) for _ in range(2)]  # type: ignore[arg-type, misc]
    sizes["top_k"] = 2
    return [MoE(**sizes, router=router, losses=LOSSES) for _ in range(2)]  # type: ignore[arg-type]


def check_routing(layers: list[MoE], x_BLD: Tensor) -> None:
    """Route through both layers; every number that a later layer reads is finite."""
    state = None
    ids_BL = torch.arange(x_BLD.shape[:2].numel()).view(x_BLD.shape[:2]) % 32
    for layer in layers:
        named = {} if isinstance(layer, SoftMoE) else {"token_ids": ids_BL}
        routing = layer.router(x_BLD, state, **named)
        assert routing.affinity.isfinite().all()
        assert routing.gate.isfinite().all() and (routing.gate >= 0).all()
        assert ((routing.expert_ids >= 0) & (routing.expert_ids <= EXPERTS)).all()
        _, state = layer(x_BLD, state, **named)
        assert state.scale.isfinite().all() and state.membership.isfinite().all()
        assert state.aux_loss.isfinite()


# Quick: every router in training; in evaluation, the one that reads what training has gathered.
EVALUATED = ROUTERS.index(AdaptiveConfig(statistics="running", measure="mad"))


@mostly_slow(
    ("router", "train"),
    [(router, train) for train in (True, False) for router in ROUTERS],
    keep={*range(len(ROUTERS)), len(ROUTERS) + EVALUATED},
    ids=str,
)
def test_extreme_tokens_are_routed(router: object, train: bool) -> None:
    layers = [layer.train(train) for layer in layers_of(router)]
    x_BLD = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(1))
    one_huge = x_BLD.clone()
    one_huge[0, 3] = 1e30
    one_huge[1, 4] = -3e38
    constant = x_BLD.clone()
    constant[..., 2] = 1.0
    most = x_BLD.sign() * 3e38  # two of them differ by more than float32 can hold
    cases = (
        *(x_BLD.sign() * 1e19, most, x_BLD * 1e30, one_huge, x_BLD * 0, x_BLD * 1e-40, constant),
        *(torch.ones(2, 9, DIM), torch.full((2, 9, DIM), 3e38), torch.full((2, 9, DIM), -1e19)),
    )
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


@pytest.mark.parametrize("router", ["smoe", ADAPTIVE[2]], ids=str)
def test_a_huge_token_goes_where_its_direction_points(router: object) -> None:
    layer = layers_of(router)[0].eval()
    x_BLD = torch.randn(1, 9, DIM, generator=torch.Generator().manual_seed(1))
    small, huge = layer.router(x_BLD), layer.router(x_BLD * 1e37)
    assert torch.equal(small.expert_ids, huge.expert_ids)
    # The gap between two affinities of a token of 2^32 is far above 1: the first takes all.
    assert (huge.gate[:, 0] == 1).all() and (huge.gate[:, 1] == 0).all()


def test_an_expert_starved_for_thousands_of_updates_keeps_its_scale() -> None:
    config = AdaptiveConfig(statistics="running")
    statistics = build_statistics(config, num_clusters=3, dim=DIM)
    buffers = (statistics.dispersion, statistics.weight)
    spread_CD = torch.rand(3, DIM, generator=torch.Generator().manual_seed(0))
    update_average(*buffers, spread_CD, torch.tensor([4.0, 4.0, 0.0]), config.momentum)
    for _ in range(3000):  # all tokens go to the first expert
        update_average(*buffers, spread_CD * 2, torch.tensor([8.0, 0.0, 0.0]), config.momentum)
    assert torch.equal(statistics.dispersion[1], spread_CD[1]) and statistics.weight[1] == 4
    # With momentum m the weight of 8 tokens per update is 8 (1 - m^3000) / (1 - m), and a little.
    limit = 8 * (1 - config.momentum**3000) / (1 - config.momentum)
    assert statistics.weight[0].item() == pytest.approx(limit, rel=1e-2)
    torch.testing.assert_close(statistics.dispersion[0], 2 * spread_CD[0], rtol=0.05, atol=0)
    scale_CD = statistics.average_scale()
    assert scale_CD.isfinite().all() and (scale_CD[2] == 1).all()  # it never had a token


@pytest.mark.parametrize("router", ["smoe", "metric", "cosine", ADAPTIVE[0], ADAPTIVE[4]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 6e4),
        (torch.float16, 65504.0),
        pytest.param(torch.bfloat16, 1e30, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 3.3e38, marks=pytest.mark.slow),
    ],
)
def test_large_16_bit_tokens_are_routed(router: object, dtype: torch.dtype, size: float) -> None:
    # float16 ends at 65,504: the affinity is a sum of products, which only float32 can hold.
    layers = [layer.to(dtype).eval() for layer in layers_of(router)]
    x_BLD = torch.randn(1, 9, DIM).clamp(-1, 1).mul(size).to(dtype)
    state = None
    for layer in layers:
        routing = layer.router(x_BLD, state)
        assert routing.affinity.isfinite().all() and routing.gate.isfinite().all()
        state = layer(x_BLD, state)[1]
        assert state.scale.isfinite().all()
