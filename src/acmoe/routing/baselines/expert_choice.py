"""Expert choice: experts select tokens, instead of tokens experts.

T tokens, D features, E experts.
"""

import math

import torch
from torch import Tensor, nn

from acmoe.config.routing import ExpertChoiceConfig, LossConfig
from acmoe.ops.precision import wide_dtype
from acmoe.ops.route.reference import first_chosen, linear_affinity
from acmoe.routing.losses import no_noise_losses, weighted_z_loss
from acmoe.routing.router import Router, flat, flat_mask, real_tokens, rows_for
from acmoe.routing.state import Routing
from acmoe.routing.topk import init_embeddings


class ExpertChoiceRouter(Router):
    """Each expert selects its best tokens of the whole call: balanced, but not causal."""

    causal = False
    always_k = False

    def __init__(
        self,
        config: ExpertChoiceConfig,
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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the expert embeddings anew and set the bias to 0."""
        init_embeddings(self.embedding)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Let each expert select tokens by the softmax gate."""
        x_TD = flat(x)
        mask_T = flat_mask(token_mask)
        affinity_TE = linear_affinity(x_TD, self.embedding, self.bias)
        gate_TE = affinity_TE.softmax(-1)
        taken_TE = self.taken(gate_TE.detach(), mask_T)
        expert_E = torch.arange(self.num_experts, device=x.device)
        expert_ids_TE = torch.where(taken_TE, expert_E, self.num_experts)
        # The load is balanced by construction: only the z-loss applies.
        loss = weighted_z_loss(self.losses, affinity_TE, mask_T)
        # A token's cluster is the expert of highest affinity among those that took it. If none did,
        # it is the expert of highest affinity of all, as for a token dropped at a capacity limit.
        first_T = first_chosen(affinity_TE, expert_ids_TE)
        return Routing(expert_ids_TE, gate_TE * taken_TE, affinity_TE, loss, first_T)

    def taken(self, gate_TE: Tensor, mask_T: Tensor | None) -> Tensor:
        """Return (T, E) bool: the token is among the expert's `capacity` best.

        A token with NaN or inf has NaN gates: no expert takes it, and it takes no other's place.
        """
        gate_TE = gate_TE.masked_fill(gate_TE.isnan(), -1.0)
        if mask_T is not None:
            gate_TE = gate_TE.masked_fill(~mask_T[:, None], -1.0)
        # float64, and divide last: k * 21 / 7 must not become 3.0000002, whose ceiling is 4.
        factor = self.config.capacity_factor * self.top_k
        if wide_dtype(gate_TE.device) == torch.float64:
            capacity = (factor * real_tokens(gate_TE, mask_T) / self.num_experts).ceil()
        else:
            most = gate_TE.shape[0]  # an infinite factor has no ceiling
            capacity = rows_for(
                lambda n: math.ceil(min(factor * n / self.num_experts, most)), gate_TE, mask_T
            )
        rank_TE = gate_TE.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
        return (rank_TE < capacity) & (gate_TE >= 0)
