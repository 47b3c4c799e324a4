"""Any base router, read in the space of M: fed with rescaled tokens, itself where M = I.

T tokens, D features, E experts, C = E clusters, J clusters per token.
"""

import itertools

import pytest
import torch

from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    ExpertChoiceConfig,
    LossConfig,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
    build_router,
)
from slow_cases import mostly_slow

BASES = {
    "smoe": SMoEConfig(bias=True),
    "cosine": CosineConfig(),
    "cosine-legacy": CosineConfig(legacy=True),
    "stable": StableConfig(vocab_size=10),
    "threshold": ThresholdConfig(threshold=0.2),
    "expert-choice": ExpertChoiceConfig(),
    "soft": SoftConfig(slots_per_expert=2),
}
MODES = [
    {"statistics": "batch"},
    {"statistics": "running"},
    {"statistics": "batch", "statistics_of": "current"},
    {"statistics": "running", "statistics_of": "current"},
    {"statistics": "prefix"},
    {"statistics": "sequence"},
]


def build(config, *, dim=6, num_experts=4, top_k=2, seed=0):
    torch.manual_seed(seed)
    losses = LossConfig(z=0.1)
    return build_router(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)


def in_clusters(num_tokens):
    """Four clusters of six features with scales of their own; some tokens stand in none."""
    generator = torch.Generator().manual_seed(4)
    state = RoutingState.identity(num_tokens=num_tokens, num_clusters=4, dim=6)
    assignment = torch.randint(-1, 4, (num_tokens, 1), generator=generator)
    scale = torch.rand(4, 6, generator=generator, dtype=torch.float64) + 0.5
    return state._replace(assignment=assignment, scale=scale)


@pytest.mark.parametrize("base", BASES)
def test_adaptive_is_the_base_router_fed_with_rescaled_tokens(base):
    router = build(AdaptiveConfig(base=BASES[base], statistics="batch")).double()
    state = in_clusters(10)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    ids = torch.arange(10).view(2, 5) % 10
    scale = torch.cat([state.scale, torch.ones(1, 6, dtype=torch.float64)])  # row -1: no cluster
    by_hand = x * scale[state.assignment[:, 0]].view(2, 5, 6)
    for training in (True, False):
        router.train(training)
        found = router(x, state, token_ids=ids)
        wanted = router.base(by_hand, state, token_ids=ids)
        for a, b in zip(found[:4], wanted[:4], strict=True):
            assert torch.equal(a, b)


@mostly_slow("mix", [1, 3], keep=(1,))
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize("base", BASES)
def test_the_identity_state_makes_adaptive_bitwise_its_base_router(base, mode, mix):
    router = build(AdaptiveConfig(base=BASES[base], mix=mix, **mode))
    if router.statistics is not None:  # a past that must not be asked
        router.statistics.dispersion.uniform_(0.5, 2.0)
        router.statistics.weight.fill_(100.0)
    state = RoutingState.identity(num_tokens=10, num_clusters=4, dim=6, mix=mix)
    ids = torch.arange(10).view(2, 5)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 5, 6).to(dtype)
        for training in (True, False):
            router.train(training)
            found = router(x, state, token_ids=ids)
            wanted = router.base(x, state, token_ids=ids)
            for a, b in zip(found[:4], wanted[:4], strict=True):
                assert torch.equal(a, b)


ISOTROPIC = [
    *itertools.product(("batch", "running", "sequence"), ("cluster", "feature", "global")),
    ("prefix", "cluster"),
]


@pytest.mark.parametrize(("statistics", "normalize"), ISOTROPIC)
def test_isotropic_clusters_leave_the_router_unchanged(statistics, normalize):
    # Tokens c + t (1, 1, 1) spread equally along every feature, whatever the measure and however
    # many of them are seen; with the same t in both clusters the other normalisations agree.
    config = AdaptiveConfig(statistics=statistics, normalize=normalize, statistics_of="current")
    router = build(config, dim=3, num_experts=2)
    moves = torch.tensor([0.0, 2.0, -1.0, 5.0, 0.5])[:, None].expand(5, 3)
    centre = torch.tensor([[5.0, 1.0, -7.0], [-2.0, 0.0, 3.0]])
    x = torch.cat([centre[0] + moves, centre[1] + moves])
    state = RoutingState.identity(num_tokens=10, num_clusters=2, dim=3)
    state = state._replace(assignment=torch.tensor([[0]] * 5 + [[1]] * 5))
    router.statistics.dispersion.fill_(0.7)
    router.statistics.weight.fill_(50.0)
    torch.testing.assert_close(router.rescale(x, state).dense(), x)
