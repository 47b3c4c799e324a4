"""Statistics and layers with a past, for the tests of what becomes of it.

T tokens, D features, C clusters.
"""

import torch

from acmoe import AdaptiveConfig, MoE, RoutingState, SMoEConfig, fold_statistics
from acmoe.routing.statistics import ClusterStatistics
from acmoe.routing.topk import SelectionBias


def taker(*, clusters=3, dim=4, **options):
    return ClusterStatistics(AdaptiveConfig(**options), num_clusters=clusters, dim=dim)


def see(statistics, x, cluster, mask=None):
    """One forward of the statistics over flat tokens."""
    return statistics.cluster_scale(x[None], cluster[None], mask, None)


def filled_layer():
    """A layer with both kinds of step statistics, none of them at its start."""
    torch.manual_seed(0)
    config = AdaptiveConfig(base=SMoEConfig(bias_balancing=0.01), momentum=0.9)
    moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config)
    for _ in range(3):
        moe(torch.randn(30, 4), RoutingState.identity(num_tokens=30, num_clusters=3, dim=4))
        fold_statistics(moe)
    moe(torch.randn(30, 4), RoutingState.identity(num_tokens=30, num_clusters=3, dim=4))
    assert moe.next_state.statistics.weight.min() > 0
    assert moe.router.base.selection.bias.abs().max() > 0
    return moe


def step_buffers(module):
    kinds = ClusterStatistics | SelectionBias
    return {
        f"{name}.{key}": value
        for name, part in module.named_modules()
        if isinstance(part, kinds)
        for key, value in part.named_buffers(recurse=False)
    }


def assert_same_buffers(module, other):
    found, wanted = step_buffers(module), step_buffers(other)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, wanted[name]), name
