"""Route by a distance in M instead of a dot product: the option `distance` of `VariantConfig`.

The expert nearest to the token in the metric M of the token's cluster has the smallest

    (h - e_k)' M (h - e_k) / 2 = h' M h / 2 - h' M e_k + e_k' M e_k / 2.

The first term is the same for all experts, so the affinity is h' M e_k - e_k' M e_k / 2: Eqn. 8 and
a bias. For this rule, and not for Eqn. 8, Proposition 1 of the paper has a proof (docs/theory.md).

Written feature by feature the affinity is sum_q m_q (h_q e_kq + 1 (-e_kq^2 / 2)). So it is the dot
product of the token (h, 1), rescaled by (m, m), with the embedding (e_k, -e_k^2 / 2), and the op
`route` with all its kernels computes it.

T tokens, D features, E experts, C clusters.
"""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.route import Route, ScaledTokens, route
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.topk import TopKRouter, over_selected


class DistanceRouter(TopKRouter):
    """Choose the k experts whose embeddings are nearest to the token in M (M = I if none)."""

    def affinity(self, x_TD: Tensor) -> Tensor:
        """Return (T, E): x . e_k - e_k . e_k / 2 + b_k, without noise and for M = I."""
        square_E = self.directions(x_TD).to(x_TD.dtype).square().sum(-1)
        return super().affinity(x_TD) - square_E / 2

    def choose(
        self,
        tokens: ScaledTokens,
        *,
        noise_TE: Tensor | None,
        mask_T: Tensor | None,
        temperature: float | None,
    ) -> Route:
        embedding_ED = self.directions(tokens.x).to(accumulation_dtype(tokens.x.dtype))
        found = route(
            with_ones(tokens),
            torch.cat([embedding_ED, -embedding_ED.square() / 2], dim=-1),
            self.bias,
            top_k=self.top_k,
            over_selected=over_selected(self.config.gate, self.top_k),
            token_mask=mask_T,
            temperature=temperature,
            noise=noise_TE,
        )
        return found._replace(x=tokens.x)


def with_ones(tokens: ScaledTokens) -> ScaledTokens:
    """Return tokens of 2 D features: (h, 1), to be rescaled by (m, m)."""
    check(
        tokens.product is None,
        "distance=True needs M itself, and these tokens hold the product M h alone; use one scale "
        "for each cluster (statistics 'batch' or 'running', mix=1)",
    )
    x = torch.cat([tokens.x, torch.ones_like(tokens.x)], dim=-1)
    scale = None if tokens.scale is None else torch.cat([tokens.scale, tokens.scale], dim=-1)
    return tokens._replace(x=x, scale=scale)
