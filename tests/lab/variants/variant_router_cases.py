"""Variant routers for the tests, and tokens for them.

T tokens, D features, E experts, C = E clusters.
"""

import torch

from acmoe import RoutingState, SMoEConfig, build_router
from acmoe.lab.variants import VariantConfig

BIASED = SMoEConfig(bias=True, gate="all")
PER_TOKEN = ("assignment", "membership")


def router_of(*, dim=4, num_experts=3, top_k=2, seed=0, **options):
    torch.manual_seed(seed)
    config = VariantConfig(**({"base": BIASED} | options))
    return build_router(config, dim=dim, num_experts=num_experts, top_k=top_k).double()


def drawn(num_tokens=24, *, dim=4, clusters=3, seed=0):
    """Tokens off the origin, and a state in which some stand in no cluster."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64) + 1.0
    state = RoutingState.identity(
        num_tokens=num_tokens, num_clusters=clusters, dim=dim, dtype=torch.float64
    )
    assignment = torch.randint(-1, clusters, (num_tokens, 1), generator=generator)
    scale = torch.rand(clusters, dim, generator=generator, dtype=torch.float64) + 0.5
    return x, state._replace(assignment=assignment, scale=scale)
