"""Measures of a routing whose true clusters are known, for the synthetic study.

T tokens, D features, C clusters of the layer before, E experts, G true clusters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from acmoe.analyze.measure.change import cluster_change, contingency
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.router import Router
from acmoe.routing.state import RoutingState


def adjusted_rand(first_T: Tensor, second_T: Tensor, size: int) -> float:
    """Return 1 for equal clusters in any numbering, and about 0 for independent ones."""
    return cluster_change(first_T, second_T, size).adjusted_rand


def condition_number(x_TD: Tensor) -> float:
    """Return the condition number of the tokens' second moment; inf where it is singular.

    The Hessian of a router's loss with respect to an expert embedding is this second moment, with
    each token weighted by the derivative of its gate.
    """
    x_TD = x_TD.double()
    value_D = torch.linalg.eigvalsh(x_TD.mT @ x_TD / len(x_TD))
    return float(value_D[-1] / value_D[0].clamp(min=0))


def scale_used(router: Router, x_TD: Tensor, state: RoutingState) -> Tensor | None:
    """Return (C, D) the scale an adaptive router applies to these tokens; None for others."""
    if not isinstance(router, AdaptiveRouter):
        return None
    if router.statistics is None:
        return state.scale
    return router.statistics.cluster_scale(x_TD[None], state.assignment[None, :, 0])


def correlation_with_truth(
    scale_CD: Tensor, assignment_T: Tensor, cluster_T: Tensor, true_stds_GD: Tensor
) -> float:
    """Correlate log M with the log of the true inverse dispersions, over tokens and features.

    Each token has the scale of its assigned cluster and the dispersions of the cluster it was drawn
    from. 1 is the scale of Lemma 1; the result is also 0 where one of the two does not vary.
    """
    size = max(len(scale_CD), len(true_stds_GD))
    table_CG = contingency(assignment_T, cluster_T, size)[: len(scale_CD), : len(true_stds_GD)]
    return _correlation(scale_CD.double().log(), -true_stds_GD.double().log(), table_CG)


def _correlation(left_CD: Tensor, right_GD: Tensor, table_CG: Tensor) -> float:
    """Correlate over tokens and features; `table_CG` counts the tokens of each pair of rows."""
    weight_CG = table_CG.double() / table_CG.sum() / left_CD.shape[1]
    left_C, right_G = weight_CG.sum(1), weight_CG.sum(0)
    left_CD = left_CD - (left_C[:, None] * left_CD).sum()
    right_GD = right_GD - (right_G[:, None] * right_GD).sum()
    left = (left_C[:, None] * left_CD.square()).sum()
    right = (right_G[:, None] * right_GD.square()).sum()
    if min(float(left), float(right)) < 1e-20:
        return 0.0
    return float((weight_CG * (left_CD @ right_GD.mT)).sum() / (left * right).sqrt())


def steps_to(threshold: float, steps: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the first measured step at or above the threshold; None where there is none."""
    return next(
        (step for step, value in zip(steps, values, strict=True) if value >= threshold), None
    )
