"""Threshold routing: a token goes to each expert whose probability exceeds p (the paper's top-p).

T tokens, D features, E experts, K the most experts that one token can have.
"""

import math

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, ThresholdConfig
from acmoe.ops.route.reference import best_first, linear_affinity
from acmoe.routing.losses import common_losses, no_noise_losses
from acmoe.routing.router import Router, flat, flat_mask
from acmoe.routing.state import Routing
from acmoe.routing.topk import init_embeddings


class ThresholdRouter(Router):
    """Select all experts with softmax probability above p, and always the best; p may be learned.

    A learned p is sigmoid(theta). The forward selection is hard. The backward uses a surrogate: a
    sigmoid around p, so that experts just below p get a gradient too, or "straight-through", slope
    1 for every selected expert.
    """

    always_k = False

    def __init__(
        self,
        config: ThresholdConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        losses = no_noise_losses(losses, config.name)
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.config = config
        self.embedding = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = nn.Parameter(torch.empty(num_experts)) if config.bias else None
        self.theta = nn.Parameter(torch.empty(())) if config.learnable else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the expert embeddings anew; set the bias to 0 and p to the config's threshold."""
        init_embeddings(self.embedding)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.theta is not None:
            threshold = self.config.threshold
            nn.init.constant_(self.theta, math.log(threshold / (1 - threshold)))

    @property
    def places(self) -> int:
        """Return K, the most experts above p: fewer than 1/p probabilities can exceed p."""
        if self.config.learnable:
            return self.num_experts
        return min(self.num_experts, max(1, math.ceil(1 / self.config.threshold) - 1))

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Route by softmax(x @ embedding^T + bias) and the threshold."""
        x_TD = flat(x)
        mask_T = flat_mask(token_mask)
        affinity_TE = linear_affinity(x_TD, self.embedding, self.bias)
        # Ranked by affinity: probabilities of different affinities may round to the same number.
        expert_ids_TK = best_first(affinity_TE, self.places)
        first_T = expert_ids_TK[:, 0].clone()
        gate_TK = affinity_TE.softmax(-1).gather(1, expert_ids_TK)
        active_TK = self.active(gate_TK)
        # Renormalise over the active experts. The first choice is always active: never 0 / 0.
        gate_TK = gate_TK * active_TK
        gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)
        expert_ids_TK = torch.where(active_TK.detach() > 0, expert_ids_TK, self.num_experts)
        loss = common_losses(self.losses, affinity_TE, expert_ids_TK, mask_T, group=self.loss_group)
        return Routing(expert_ids_TK, gate_TK, affinity_TE, loss, first_T)

    def active(self, gate_TK: Tensor) -> Tensor:
        """Return (T, K): 1 for a selected expert, else 0, with the surrogate's gradient."""
        if self.theta is None:
            active_TK = (gate_TK.detach() > self.config.threshold).to(gate_TK.dtype)
        else:
            margin_TK = gate_TK - self.theta.to(gate_TK.dtype).sigmoid()
            hard_TK = (margin_TK.detach() > 0).to(gate_TK.dtype)
            if self.config.surrogate == "straight-through":
                soft_TK = margin_TK * hard_TK
            else:
                soft_TK = (margin_TK / self.config.temperature).sigmoid()
            active_TK = hard_TK + (soft_TK - soft_TK.detach())
        # The first choice is selected whatever p is, so its gradient is 0. With the same slope as
        # the others it would cancel theirs: renormalised gates are invariant to a common factor.
        return torch.cat([torch.ones_like(active_TK[:, :1]), active_TK[:, 1:]], dim=1)
