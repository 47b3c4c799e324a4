"""SoftMoE routing: every expert processes slots, each of which is a weighted mean of all tokens.

B sequences of L tokens, D features, E experts, P slots per expert, S = E * P slots.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, SoftConfig
from acmoe.ops.unit import unit_rows
from acmoe.routing.router import Router
from acmoe.routing.state import Routing


class SoftRouting(NamedTuple):
    """Dispatch and combine weights, and the `Routing` that the next layer reads."""

    dispatch: Tensor  # (B, L, S) softmax over L: weights of the tokens in each slot
    combine: Tensor  # (B, L, S) softmax over S: weights of the slots' outputs in a token
    routing: Routing  # affinity: log of each expert's summed combine weight


class SoftRouter(Router):
    """Cosine logits between tokens and slots, times one learned scale."""

    causal = False
    always_k = False  # `decide` returns only the expert of the best slot

    def __init__(
        self,
        config: SoftConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        losses: LossConfig | None = None,
    ) -> None:
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.config = config
        slots = num_experts * config.slots_per_expert
        self.slots = nn.Parameter(torch.empty(slots, dim))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the slots anew, of norm about 1, and set their scale to 1."""
        self.slots.normal_().div_(math.sqrt(self.dim))
        self.logit_scale.fill_(1.0)

    def mixtures(self, x_BLD: Tensor, token_mask: Tensor | None) -> SoftRouting:
        """Return dispatch and combine weights from (rescaled) tokens."""
        B, L, _ = x_BLD.shape
        x_BLD = x_BLD.to(torch.promote_types(x_BLD.dtype, torch.float32))
        slots_SD = unit_rows(self.slots.to(x_BLD.dtype))
        logits_BLS = unit_rows(x_BLD) @ slots_SD.T
        logits_BLS = self.logit_scale.to(x_BLD.dtype) * logits_BLS
        by_token_BLS = logits_BLS
        if token_mask is not None:
            # The lowest finite number, not -inf: a fully masked sequence must not give NaN.
            lowest = torch.finfo(x_BLD.dtype).min
            by_token_BLS = logits_BLS.masked_fill(~token_mask[..., None], lowest)
        dispatch_BLS = by_token_BLS.softmax(1)
        if token_mask is not None:
            dispatch_BLS = dispatch_BLS.masked_fill(~token_mask[..., None], 0.0)
        combine_BLS = logits_BLS.softmax(-1)
        per_expert = self.config.slots_per_expert
        share_TE = combine_BLS.view(B * L, self.num_experts, per_expert).sum(-1)
        expert_T1 = share_TE.argmax(-1, keepdim=True)
        none = x_BLD.new_zeros((), dtype=torch.float32)
        log_share_TE = share_TE.clamp(min=torch.finfo(x_BLD.dtype).tiny).log()
        gate_T1 = share_TE.gather(1, expert_T1)
        routing = Routing(expert_T1, gate_T1, log_share_TE, none, expert_T1[:, 0].clone())
        return SoftRouting(dispatch_BLS, combine_BLS, routing)

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Return the routing of each token by its expert of largest combine weight."""
        x_BLD, mask_BL = (x, token_mask) if x.dim() == 3 else as_one_sequence(x, token_mask)
        return self.mixtures(x_BLD, mask_BL).routing


def as_one_sequence(x_TD: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Add a leading dimension of 1 to tokens (T, D) and mask (T,)."""
    return x_TD[None], None if mask_T is None else mask_T[None]
