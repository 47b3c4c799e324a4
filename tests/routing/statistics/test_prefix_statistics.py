"""Prefix statistics against a loop that walks each sequence token by token.

B sequences, L tokens in each, D features, C clusters, J clusters per token.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from router_loops import scales

from acmoe import AdaptiveConfig, RoutingState, build_router
from acmoe.errors import UserError
from acmoe.routing.statistics import build_statistics

DIM, CLUSTERS = 3, 3


def walk(x_LD, clusters_LJ, real_L, measure):
    """For each token and each of its clusters: how many were seen so far, and their spread."""
    seen = {c: [] for c in range(CLUSTERS)}
    moved = {c: torch.zeros(DIM, dtype=torch.float64) for c in range(CLUSTERS)}
    found = []
    for x_D, clusters, real in zip(x_LD, clusters_LJ, real_L, strict=True):
        own = clusters[0]
        if real and own >= 0:
            seen[own].append(x_D)
            # A deviation is taken from the mean known when the token came: no future is needed.
            moved[own] = moved[own] + (x_D - torch.stack(seen[own]).mean(0)).abs()
        row = []
        for c in clusters:
            tokens = seen.get(c, [])
            n = len(tokens)
            if n < 2:
                row.append((0, torch.zeros(DIM, dtype=torch.float64)))
                continue
            variance = torch.stack(tokens).var(0, correction=0)
            by_measure = {"mad": moved[c] / n, "variance": variance, "std": variance.sqrt()}
            row.append((n, by_measure[measure]))
        found.append(row)
    return found


def expected_scale(n, spread, prior, prior_tokens, strength):
    """The prefix shrunk towards the running average, which counts as `prior_tokens` tokens."""
    k = prior_tokens if prior is not None else 0.0
    if n + k < 2:
        return torch.ones(DIM, dtype=torch.float64)
    s = n * spread / (n + k)
    s = s if prior is None else s + k * prior / (n + k)
    if s.sum() == 0:
        return torch.ones(DIM, dtype=torch.float64)
    return torch.stack(scales([list(s.unbind())], DIM, strength=strength)[0])


@given(
    sequences=st.integers(1, 2),
    length=st.integers(1, 8),
    measure=st.sampled_from(["mad", "variance", "std"]),
    strength=st.sampled_from([None, 0.4]),
    prior_tokens=st.sampled_from([0.0, 1.0, 16.0]),
    known=st.lists(st.booleans(), min_size=CLUSTERS, max_size=CLUSTERS),
    mix=st.integers(1, 2),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_token_is_scaled_by_what_its_sequence_showed_so_far(
    sequences, length, measure, strength, prior_tokens, known, mix, padded, seed
):
    config = AdaptiveConfig(
        statistics="prefix",
        measure=measure,
        strength=strength,
        prior_tokens=prior_tokens,
        mix=mix,
    )
    router = build_router(config, dim=DIM, num_experts=CLUSTERS, top_k=1).double()
    generator = torch.Generator().manual_seed(seed)
    router.statistics.dispersion.copy_(torch.rand(CLUSTERS, DIM, generator=generator) + 0.2)
    router.statistics.weight.copy_(torch.tensor(known) * 50.0)
    x = torch.randn(sequences, length, DIM, generator=generator, dtype=torch.float64)
    order = torch.rand(sequences, length, CLUSTERS, generator=generator).argsort(-1)[..., :mix]
    order[torch.rand(sequences, length, generator=generator) < 0.1] = -1
    share = torch.rand(sequences, length, mix, generator=generator, dtype=torch.float64)
    share = share / share.sum(-1, keepdim=True)
    mask = torch.rand(sequences, length, generator=generator) < 0.7 if padded else None
    state = RoutingState(
        order.reshape(-1, mix),
        share.reshape(-1, mix),
        torch.ones(CLUSTERS, DIM, dtype=torch.float64),
        torch.zeros(()),
    )
    found = router.rescale(x, state, token_mask=mask).dense()

    prior = [
        router.statistics.dispersion[c].double() if known[c] else None for c in range(CLUSTERS)
    ]
    for b in range(sequences):
        real = [True] * length if mask is None else mask[b].tolist()
        walked = walk(x[b], order[b].tolist(), real, measure)
        for t in range(length):
            if not real[t]:
                continue
            factor = torch.zeros(DIM, dtype=torch.float64)
            for j, (n, spread) in enumerate(walked[t]):
                c = order[b, t, j].item()
                one = torch.ones(DIM, dtype=torch.float64)
                scale = expected_scale(n, spread, prior[c], prior_tokens, strength)
                factor = factor + share[b, t, j] * (scale if c >= 0 else one)
            torch.testing.assert_close(found[b, t], x[b, t] * factor, rtol=1e-8, atol=1e-9)


def test_the_prior_counts_as_so_many_tokens_by_hand():
    # Tokens 0 and (2, 6) of one cluster. Online deviations: 0, then |x - mean| = (1, 3); divided by
    # two tokens: s = (0.5, 1.5). The prior (2.5, 0.5) counts as two: (2 s + 2 prior) / 4 =
    # (1.5, 1), so M = (1/1.5, 1) over its mean 5/6 = (0.8, 1.2).
    config = AdaptiveConfig(statistics="prefix", prior_tokens=2.0)
    router = build_router(config, dim=2, num_experts=1, top_k=1).double()
    router.statistics.dispersion.copy_(torch.tensor([[2.5, 0.5]]))
    router.statistics.weight.fill_(9.0)
    state = RoutingState.identity(num_tokens=2, num_clusters=1, dim=2, dtype=torch.float64)
    state = state._replace(assignment=torch.zeros(2, 1, dtype=torch.int64))
    x = torch.tensor([[0.0, 0.0], [2.0, 6.0]], dtype=torch.float64)
    found = router.rescale(x, state).dense()[1]
    torch.testing.assert_close(found, torch.tensor([1.6, 7.2], dtype=torch.float64))


def test_a_flat_call_is_one_sequence():
    router = build_router(AdaptiveConfig(statistics="prefix"), dim=3, num_experts=3, top_k=1)
    x = torch.randn(6, 3)
    state = RoutingState.identity(num_tokens=6, num_clusters=3, dim=3)
    state = state._replace(assignment=torch.tensor([[0], [0], [1], [0], [1], [1]]))
    found = router.rescale(x, state).dense()
    torch.testing.assert_close(found, router.rescale(x[None], state).dense()[0])


def test_clusters_have_no_common_scale_under_prefix_statistics() -> None:
    config = AdaptiveConfig(statistics="prefix", statistics_of="current")
    statistics = build_statistics(config, num_clusters=2, dim=3)
    with pytest.raises(UserError, match="call prefix_scale"):
        statistics.cluster_scale(torch.randn(1, 4, 3), torch.zeros(1, 4, dtype=torch.long))
