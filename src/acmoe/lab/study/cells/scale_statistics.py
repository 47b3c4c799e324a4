"""Measure the distance of a trained model's M from the identity, and the part clusters share.

C clusters, D features.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acmoe.ops.statistics.log_scale import split_log_scale
from acmoe.routing.statistics import ClusterStatistics


class ScaleStatistics(NamedTuple):
    """Statistics of log M over the clusters with a scale of their own; all are 0 where M = I."""

    rms_log: float  # sqrt(mean (log M)^2)
    common: float  # share of that mean square that is equal in all clusters, feature by feature
    clusters: int  # number of clusters with enough tokens for a scale


def scale_statistics(scale_CD: Tensor, occupied_C: Tensor) -> ScaleStatistics:
    """Split log M into common and own part, which are orthogonal: their mean squares add up."""
    clusters = int(occupied_C.sum())
    common_D, own_CD = split_log_scale(scale_CD.double(), occupied_C)
    common = float(common_D.square().mean())
    own = float(own_CD[occupied_C].square().mean()) if clusters else 0.0
    total = common + own
    return ScaleStatistics(math.sqrt(total), common / total if total else 0.0, clusters)


@torch.no_grad()
def model_scale_statistics(model: nn.Module) -> list[ScaleStatistics]:
    """Return statistics of the running average of M for every adaptive layer, in order."""
    return [
        scale_statistics(module.average_scale(), module.weight >= max(1, module.config.min_tokens))
        for module in model.modules()
        if isinstance(module, ClusterStatistics)
    ]
