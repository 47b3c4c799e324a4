"""Parts of the image classifiers: dense layer, loop over blocks, initial weights and state.

Shapes: B batch, D features.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from acmoe.experts.mlp import ExpertMLP
from acmoe.models.images.init import trunc_normal_
from acmoe.ops.recompute import recompute
from acmoe.routing.state import RoutingState


class FeedForward(nn.Module):
    """Linear, exact GELU, linear: the dense counterpart of an expert."""

    def __init__(self, dim: int, hidden: int, *, last_bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=last_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(nn.functional.gelu(self.up(x))))


def drop_path_rates(last: float, num_blocks: int) -> list[float]:
    """Return the stochastic-depth rate of each block: linear from 0 to `last`."""
    return [last * block / max(num_blocks - 1, 1) for block in range(num_blocks)]


def draw_kept(x: Tensor, rate: float, *, training: bool) -> Tensor | None:
    """Draw stochastic depth: (2, B) weights of a block's branches per image, 0 at the given rate.

    The weights are drawn outside the block and passed as a tensor: blocks of different rates then
    share one compiled graph, and a recompute sees the same draw. None: nothing is dropped.
    """
    if not training or rate == 0:
        return None
    return x.new_empty(2, len(x)).bernoulli_(1 - rate) / (1 - rate)


def scale_branch(branch: Tensor, weight_B: Tensor | None) -> Tensor:
    """Multiply the branch of each image by its weight."""
    return branch if weight_B is None else branch * weight_B.view(-1, *[1] * (branch.dim() - 1))


def run_blocks(
    blocks: Iterable[nn.Module],
    drops: Sequence[float],
    x: Tensor,
    state: RoutingState,
    *,
    training: bool,
    checkpoint_blocks: bool,
) -> tuple[Tensor, RoutingState]:
    """Run the blocks with stochastic depth at their rates `drops`; return x and the last state.

    With checkpoint_blocks the backward recomputes the activations inside a block.
    """
    recomputes = checkpoint_blocks and torch.is_grad_enabled()
    for block, drop in zip(blocks, drops, strict=True):
        kept_2B = draw_kept(x, drop, training=training)
        call = partial(recompute, block) if recomputes else block
        x, state = call(x, state, kept_2B)
    return x, state


def init_linear(model: nn.Module, std: float) -> None:
    """Set truncated normal weights and zero biases, in dense layers and experts."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ExpertMLP):
            trunc_normal_(module.up, std=std)
            trunc_normal_(module.down, std=std)


def new_state(x: Tensor, num_experts: int, aux_loss: Tensor | None = None) -> RoutingState:
    """Return the identity state for tokens x (B, ..., D), with the given aux_loss, if any."""
    state = RoutingState.before(x, num_clusters=num_experts)
    return state if aux_loss is None else state._replace(aux_loss=aux_loss)
