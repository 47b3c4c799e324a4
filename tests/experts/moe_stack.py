"""A small stack of MoE layers with residuals: the least model in which a state flows.

B sequences, L tokens in each, D features.
"""

import torch
from torch import Tensor, nn

from acmoe import LossConfig, MoE, RoutingState
from acmoe.routing.statistics.cache import LayerCache

DIM, EXPERTS, WORDS = 6, 4, 20


class Block(nn.Module):
    """x + MoE(norm(x)). Knows nothing of its depth."""

    def __init__(self, *, top_k: int = 2, **options):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE(
            dim=DIM,
            hidden=8,
            num_experts=EXPERTS,
            top_k=top_k,
            losses=LossConfig(balance=0.1, z=0.01),
            **options,
        )

    def forward(
        self,
        x: Tensor,
        state: RoutingState,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, RoutingState]:
        y, state = self.moe(
            self.norm(x), state, token_mask=token_mask, token_ids=token_ids, cache=cache
        )
        return x + y, state


def stack(depth: int, *, seed: int = 0, **options) -> nn.ModuleList:
    """`depth` equal blocks whose running statistics already hold a past."""
    torch.manual_seed(seed)
    blocks = nn.ModuleList(Block(**options) for _ in range(depth))
    for name, buffer in blocks.named_buffers():
        if name.endswith("statistics.dispersion"):
            buffer.uniform_(0.3, 2.0)
        elif name.endswith("statistics.weight"):
            buffer.fill_(20.0)
    return blocks


def begin(blocks: nn.ModuleList, x: Tensor) -> RoutingState:
    return RoutingState.identity(
        num_tokens=x[..., 0].numel(),
        num_clusters=EXPERTS,
        dim=DIM,
        mix=blocks[0].moe.router.mix,
        dtype=torch.float64 if x.dtype == torch.float64 else torch.float32,
    )
