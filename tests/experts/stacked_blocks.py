"""Blocks with MoE layers for an `MoEStack`, and the loop that it stands for.

D features.
"""

import torch
from torch import nn

from acmoe import AdaptiveConfig, LossConfig, MoE, MoEFFN, MoEStack

D = 6
PAPER = AdaptiveConfig(statistics="batch")
OTHER = AdaptiveConfig(statistics="batch", measure="variance", mix=2)
SIZES = {"dim": D, "hidden": 8, "num_experts": 4, "top_k": 2}


def moe(router="smoe", **options):
    return MoE(**SIZES, router=router, losses=LossConfig(balance=0.1), **options)


class Block(nn.Module):
    """A block of somebody's transformer, in which an MoEFFN has taken the place of the MLP."""

    def __init__(self, router, **options):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = MoEFFN(moe(router, **options))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def paper_layout(**options):
    """A plain first layer, a dense module, then two adaptive layers with different measures."""
    torch.manual_seed(0)
    return MoEStack(
        [Block("smoe"), nn.Linear(D, D), Block(PAPER), Block(OTHER), nn.LayerNorm(D)], **options
    )


def by_hand(stack, x):
    state = None
    for module in stack:
        if isinstance(module, Block):
            y, state = module.mlp.moe(module.norm(x), state)
            x = x + y
        else:
            x = module(x)
    return x, state


def gradients(stack, loss):
    stack.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in stack.parameters() if p.grad is not None]
