"""What the synthetic study asks of a routing whose true clusters are known.

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
    """1: the same clusters, whatever their numbers; 0: as unlike as chance."""
    return cluster_change(first_T, second_T, size).adjusted_rand


def condition_number(x_TD: Tensor) -> float:
    """Greatest over least eigenvalue of the second moment of the tokens; inf where it is singular.

    The Hessian of a router's loss in an expert embedding is this moment, each token weighted by
    its gate's slope.
    """
    x_TD = x_TD.double()
    value_D = torch.linalg.eigvalsh(x_TD.mT @ x_TD / len(x_TD))
    return float(value_D[-1] / value_D[0].clamp(min=0))


def scale_read(router: Router, x_TD: Tensor, state: RoutingState) -> Tensor | None:
    """(C, D) the scale an adaptive router reads these tokens with; None for other routers."""
    if not isinstance(router, AdaptiveRouter):
        return None
    if router.statistics is None:
        return state.scale
    return router.statistics.cluster_scale(x_TD[None], state.assignment[None, :, 0], None, None)


def truth_of_scale(
    scale_CD: Tensor, assignment_T: Tensor, cluster_T: Tensor, true_stds_GD: Tensor
) -> float:
    """Correlation of the log of M with the log of the true inverse dispersions.

    Over tokens and features: a token brings the scale it is read with and the dispersions of the
    cluster it was drawn from. 1 is the scale of Lemma 1; 0 stands also where one does not vary.
    """
    size = max(len(scale_CD), len(true_stds_GD))
    table_CG = contingency(assignment_T, cluster_T, size)[: len(scale_CD), : len(true_stds_GD)]
    return _correlation(scale_CD.double().log(), -true_stds_GD.double().log(), table_CG)


def _correlation(left_CD: Tensor, right_GD: Tensor, table_CG: Tensor) -> float:
    """Over tokens and features, from how many tokens carry each pair of rows."""
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
    """The first step measured at or above the threshold; None: never."""
    return next(
        (step for step, value in zip(steps, values, strict=True) if value >= threshold), None
    )
