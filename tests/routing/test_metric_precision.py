"""The metric router's averages against two passes over all tokens, weighted by their age.

In float32, the dtype of all running averages, the two differ by rounding alone: with the same
averages in float64 they agree to 1e-9.

T tokens, D features, E experts.
"""

import random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.config.routing import MetricConfig
from acmoe.routing.build import build_router
from acmoe.routing.metric import MetricRouter
from acmoe.routing.state import RoutingState
from acmoe.routing.statistics.step import fold_statistics

Batches = list[tuple[Tensor, list[int]]]  # of one update: tokens, and the first choice of each
Weighted = list[tuple[float, Tensor]]  # tokens with their weights


def moments(tokens: Weighted) -> tuple[Tensor, Tensor]:
    weight = sum(w for w, _ in tokens)
    mean_D = sum(w * x_D for w, x_D in tokens) / weight
    return mean_D, sum(w * (x_D - mean_D) ** 2 for w, x_D in tokens) / weight


def mean_and_variance(updates: list[Batches], config: MetricConfig, experts: int) -> Any:
    """Return mean and variance (E, D); None if no expert ever had two tokens in an update."""
    own: list[Weighted] = [[] for _ in range(experts)]
    for batches in updates:
        for e in range(experts):
            new = [x for x_TD, first in batches for x, f in zip(x_TD, first, strict=True) if f == e]
            if len(new) >= 2:
                own[e] = [(config.momentum * w, x_D) for w, x_D in own[e]]
                own[e] += [(1.0, x_D) for x_D in new]
    every = [one for tokens in own for one in tokens]
    total = sum(w for w, _ in every)
    if total == 0:
        return None
    prior = [(config.prior_tokens * w / total, x_D) for w, x_D in every]
    found = [moments(tokens + prior) for tokens in own]
    least_D = (config.floor * moments(every)[1]).clamp(min=1e-12)
    mean_ED = torch.stack([mean_D for mean_D, _ in found])
    return mean_ED, torch.stack([torch.maximum(v_D, least_D) for _, v_D in found])


def router_of(config: MetricConfig, dim: int, experts: int) -> MetricRouter:
    torch.manual_seed(0)
    router = build_router(config, dim=dim, num_experts=experts, top_k=1)
    assert isinstance(router, MetricRouter)
    return router


@given(st.integers(0, 10**6))
def test_the_averages_are_those_of_all_tokens_up_to_the_rounding_of_float32(seed: int) -> None:
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dim, experts = choice.randint(1, 8), choice.randint(2, 6)
    config = MetricConfig(
        momentum=choice.choice([0.0, 0.5, 0.95]), prior_tokens=choice.choice([0.5, 16.0])
    )
    single, double = (router_of(config, dim, experts) for _ in range(2))
    double.double()
    buffers = double.statistics._buffers  # float32 under `.double()`, too
    buffers.update({name: buffer.double() for name, buffer in buffers.items()})  # type: ignore[union-attr]
    offset_D = choice.choice([0, 1, 100]) * torch.randn(dim, generator=generator)
    spread_D = choice.choice([0.1, 1]) * (torch.rand(dim, generator=generator) + 0.05)
    updates: list[Batches] = []
    for _ in range(choice.randint(1, 5)):
        updates.append([])
        for tokens in choice.choices([1, 2, 8, 30], k=choice.randint(1, 3)):
            x_TD = offset_D + spread_D * torch.randn(tokens, dim, generator=generator)
            mask_T = torch.rand(tokens, generator=generator) > 0.2
            state = RoutingState.identity(num_tokens=tokens, num_clusters=experts, dim=dim)
            first_T = single(x_TD, state, token_mask=mask_T).affinity.argmax(-1)
            double.statistics.record(x_TD.double(), first_T, mask_T)
            updates[-1].append((x_TD[mask_T].double(), first_T[mask_T].tolist()))
        for router in (single, double):
            fold_statistics(router)
    wanted = mean_and_variance(updates, config, experts)
    if wanted is None:
        return
    mean_ED, variance_ED = wanted
    x_TD = x_TD.double()
    distance_TE = ((x_TD[:, None] - mean_ED) ** 2 / variance_ED + variance_ED.log()).mean(-1)
    # A float32 number of the size of the offset is rounded by up to 2^-24 of it.
    rounding = 2**-24 * (offset_D.abs().max().item() / spread_D.min().item() + 1)
    for router, tolerance in ((double, 1e-9), (single, 1e-3 + 100 * rounding)):
        found_ED, found_variance_ED = router.statistics.mean_and_variance()
        found_TE = router.distance(x_TD.to(router.embedding.dtype))
        for found, exact in (
            (found_ED, mean_ED),
            (found_variance_ED / variance_ED, torch.ones_like(variance_ED)),
            (found_TE, distance_TE),
        ):
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
