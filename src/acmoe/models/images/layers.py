"""The parts of image classifiers: dense layer, stochastic depth, initial weights and state.

Shapes: B batch, D features.
"""

from typing import cast

from torch import Tensor, nn

from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.state import RoutingState


class FeedForward(nn.Module):
    """Linear, exact GELU, linear: what an expert is, for every token alike."""

    def __init__(self, dim: int, hidden: int, *, last_bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=last_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(nn.functional.gelu(self.up(x))))


def drop_path_rates(last: float, num_blocks: int) -> list[float]:
    """From 0 in the first block to `last` in the last, linearly."""
    return [last * block / max(num_blocks - 1, 1) for block in range(num_blocks)]


def draw_kept(x: Tensor, rate: float, *, training: bool) -> Tensor | None:
    """(2, B) weights of each image's two branches of a block: 0 skips it, at the given rate.

    Drawn outside the block, to which it is a tensor like any other: blocks of different rates then
    compile to one graph, and a recompute sees the same draw. None: nothing is skipped.
    """
    if not training or rate == 0:
        return None
    return x.new_empty(2, len(x)).bernoulli_(1 - rate) / (1 - rate)


def kept(branch: Tensor, weight_B: Tensor | None) -> Tensor:
    """The branch of each image times its weight."""
    return branch if weight_B is None else branch * weight_B.view(-1, *[1] * (branch.dim() - 1))


def init_linear(model: nn.Module, std: float) -> None:
    """Truncated normal weights and zero biases, in dense layers and experts alike."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ExpertMLP):
            nn.init.trunc_normal_(module.up, std=std)
            nn.init.trunc_normal_(module.down, std=std)


def new_state(x: Tensor, num_experts: int, aux_loss: Tensor | None = None) -> RoutingState:
    """The identity for tokens x (B, ..., D) that no MoE layer has seen; the losses go on."""
    state = RoutingState.identity(
        num_tokens=x.shape[:-1].numel(),
        num_clusters=num_experts,
        dim=x.shape[-1],
        device=x.device,
        dtype=accumulation_dtype(x.dtype),
    )
    return state if aux_loss is None else state._replace(aux_loss=aux_loss)
