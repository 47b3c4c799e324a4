"""Rules that assign a token of a known mixture to an expert, computed by the library's routers.

T tokens, D features, C clusters, E = C experts.
"""

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, MetricConfig
from acmoe.data.synthetic import GaussianClusters
from acmoe.lab.variants import variant_of
from acmoe.routing.build import build_router
from acmoe.routing.metric import MetricRouter
from acmoe.routing.state import RoutingState


def adaptive_choice(
    x_TD: Tensor, embedding_ED: Tensor, scale_CD: Tensor, assignment_T: Tensor
) -> Tensor:
    """Return the experts k with the largest h' M_k* e_k, (T,); k* is given by `assignment_T`."""
    paper = AdaptiveConfig.preset("paper")
    return _choice(paper, x_TD, embedding_ED, scale_CD, assignment_T)


def distance_choice(
    x_TD: Tensor, embedding_ED: Tensor, scale_CD: Tensor, assignment_T: Tensor
) -> Tensor:
    """Return the experts nearest in M_k*, (T,), by the variant router `distance`."""
    config = variant_of(AdaptiveConfig.preset("paper"), distance=True)
    return _choice(config, x_TD, embedding_ED, scale_CD, assignment_T)


def _choice(
    config: AdaptiveConfig,
    x_TD: Tensor,
    embedding_ED: Tensor,
    scale_CD: Tensor,
    assignment_T: Tensor,
) -> Tensor:
    num_experts, dim = embedding_ED.shape
    router = build_router(config, dim=dim, num_experts=num_experts, top_k=1).to(x_TD.dtype).eval()
    state = RoutingState.identity(
        num_tokens=len(x_TD), num_clusters=num_experts, dim=dim, dtype=x_TD.dtype
    )
    state = state._replace(assignment=assignment_T[:, None], scale=scale_CD)
    with torch.no_grad():
        router.get_parameter("base.embedding").copy_(embedding_ED)
        affinity_TE: Tensor = router(x_TD, state).affinity
    return affinity_TE.argmax(-1)


def own_metric_choice(x_TD: Tensor, assignment_T: Tensor, num_experts: int) -> Tensor:
    """Return the choices if each expert measures distances in its own metric, (T,).

    An expert's metric comes from the mean and variance of the tokens assigned to it. Embeddings are
    zero and play no part.
    """
    dim = x_TD.shape[1]
    # The router's distance is a mean over features, the log density a sum: multiply by D.
    config = MetricConfig(strength=float(dim))
    router = MetricRouter(config, dim=dim, num_experts=num_experts, top_k=1)
    with torch.no_grad():
        router.embedding.zero_()
        router.statistics.record(x_TD, assignment_T, None)
        router.statistics.update()
        return router.affinity(x_TD).argmax(-1)


def bayes_choice(x_TD: Tensor, clusters: GaussianClusters) -> Tensor:
    """Return the likeliest cluster given the true moments, (T,).

    No rule that sees only the token errs less often.
    """
    log_density_TC = torch.stack(
        [
            -((x_TD - mean_D) / std_D).square().sum(-1) / 2 - std_D.log().sum()
            for mean_D, std_D in zip(clusters.means, clusters.stds, strict=True)
        ],
        dim=-1,
    )
    return log_density_TC.argmax(-1)
