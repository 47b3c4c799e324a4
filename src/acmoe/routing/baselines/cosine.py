"""The cosine router of XMoE.

T tokens, D features, P projected features, E experts, K experts per token.
"""

import math

import torch
from torch import Tensor, nn

from acmoe.config.routing import CosineConfig, LossConfig
from acmoe.ops.unit import unit_rows
from acmoe.routing.losses import common_losses, no_noise_losses
from acmoe.routing.router import Router, flat, flat_mask
from acmoe.routing.state import Routing
from acmoe.routing.topk import init_embeddings, select

# The bound on log(1 / temperature), so that the gate cannot saturate.
_GREATEST_LOG_SCALE = math.log(100.0)


class CosineRouter(Router):
    """XMoE: affinity = cos(R x, e_k) / tau in a low dimension, with learned tau.

    `legacy` is the baseline of the published code: R x is not normalised and there is no tau.
    """

    def __init__(
        self,
        config: CosineConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        losses = no_noise_losses(losses, config.name)
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.config = config
        proj_dim = config.proj_dim or max(1, num_experts // 2)
        self.project = nn.Parameter(torch.empty(proj_dim, dim))
        self.embedding = nn.Parameter(torch.empty(num_experts, proj_dim))
        self.log_scale: nn.Parameter | None = None
        if not config.legacy:
            self.log_scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projection and embeddings anew; set the temperature of the config."""
        nn.init.uniform_(self.project, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))
        init_embeddings(self.embedding, "orthogonal")
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, -math.log(self.config.temperature))

    def affinity(self, x_TD: Tensor) -> Tensor:
        """Return the (T, E) cosine affinities."""
        reduced_TP = x_TD @ self.project.to(x_TD.dtype).T
        embedding_EP = unit_rows(self.embedding.to(x_TD.dtype))
        if self.log_scale is None:
            return reduced_TP @ embedding_EP.T
        scale = self.log_scale.to(x_TD.dtype).clamp(max=_GREATEST_LOG_SCALE).exp()
        return scale * unit_rows(reduced_TP) @ embedding_EP.T

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Select the top K experts by cosine affinity."""
        mask_T = flat_mask(token_mask)
        affinity_TE = self.affinity(flat(x))
        expert_ids_TK, gate_TK = select(affinity_TE, self.top_k, self.config.gate)
        loss = common_losses(self.losses, affinity_TE, expert_ids_TK, mask_T, group=self.loss_group)
        return Routing(expert_ids_TK, gate_TK, affinity_TE, loss, expert_ids_TK[:, 0].clone())
