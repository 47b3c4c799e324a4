"""Hash routing: the experts of a token depend on its id alone.

T tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor

from acmoe.config.routing import HashConfig, LossConfig
from acmoe.ops.route.reference import best_first
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.losses import no_noise_losses
from acmoe.routing.router import Router, need_token_ids
from acmoe.routing.state import Routing


class HashRouter(Router):
    """Each token id has its own fixed random experts, with equal gates.

    The router has no parameters, so the balance loss and the z-loss that a model sets for all its
    layers have nothing to act on here: the loss is 0.
    """

    def __init__(
        self,
        config: HashConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        losses = no_noise_losses(losses, config.name)
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.config = config

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Select the K experts whose hash with the token id is largest."""
        ids_T = need_token_ids(token_ids, x, self.config.name)
        expert_E = torch.arange(self.num_experts, device=x.device)
        dtype = accumulation_dtype(x.dtype)
        key_TE = scramble(ids_T[:, None] * self.num_experts + expert_E, self.config.seed)
        affinity_TE = key_TE.to(dtype) / 2**31
        expert_ids_TK = best_first(key_TE, self.top_k)
        gate_TK = torch.full_like(expert_ids_TK, 1 / self.top_k, dtype=dtype)
        loss = x.new_zeros((), dtype=torch.float32)
        # Not the argmax of the affinity: float32 rounds the 31 bits of a key.
        return Routing(expert_ids_TK, gate_TK, affinity_TE, loss, expert_ids_TK[:, 0].clone())


def scramble(value: Tensor, seed: int) -> Tensor:
    """Hash integers to 31 bits: multiply, xor the high bits into the low ones, repeat."""
    value = value.long() + (seed * 0x9E3779B1 & 0x7FFFFFFF)
    for factor in (0x45D9F3B, 0x119DE1F3):
        value = (value ^ (value >> 16)) * factor & 0x7FFFFFFF
    return value ^ (value >> 15)
