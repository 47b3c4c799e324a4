"""Training loops of a small stack, run in one process or in several."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import acmoe
from acmoe.routing.statistics.step import StepStatistics

DIM, EXPERTS, TOKENS, STEPS = 6, 4, 32, 6


class Stack(nn.Module):
    """Two MoE layers with residuals; a masked token takes part in nothing."""

    def __init__(self, router: Any, losses: acmoe.LossConfig | None = None) -> None:
        super().__init__()
        sizes = {"dim": DIM, "hidden": 8, "num_experts": EXPERTS, "top_k": 2}
        self.layers = nn.ModuleList(
            acmoe.MoE(**sizes, router=router, losses=losses) for _ in range(2)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        state = None
        for layer in self.layers:
            y, state = layer(x, state, token_mask=mask)
            x = x + y
        assert state is not None
        x = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
        return x.square().sum(-1).mean() + state.aux_loss


def build(router: Any, dtype: torch.dtype, losses: acmoe.LossConfig | None = None) -> Stack:
    torch.manual_seed(0)
    return Stack(router, losses).to(dtype).train()


def data(step: int, dtype: torch.dtype) -> Tensor:
    """(4, TOKENS / 4, DIM): four sequences, whose spread differs by feature and by sequence."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(4, TOKENS // 4, DIM, generator=generator, dtype=torch.float64)
    spread = torch.arange(1, DIM + 1) * torch.linspace(0.5, 2, 4)[:, None, None]
    return (x * spread + torch.arange(4)[:, None, None]).to(dtype)


def train(
    rank: int,
    wrap: str,
    router: Any,
    dtype: torch.dtype = torch.float64,
    losses: acmoe.LossConfig | None = None,
    parts: int = 1,
    whole: bool = False,
) -> dict[str, Any]:
    """Train STEPS steps; rank r of n takes sequences r, r + n, ... of every batch.

    parts: micro-batches of an update. whole: take the balance loss over all ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = build(router, dtype, losses)
    if whole and world > 1:
        acmoe.set_statistics_group(model, dist.group.WORLD)
    wrapped: nn.Module = model
    if wrap == "ddp" and world > 1:
        wrapped = DistributedDataParallel(model)
    elif wrap == "fsdp" and world > 1:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trace, equal = [], True
    for step in range(STEPS):
        total = torch.zeros((), dtype=dtype)
        for x in data(step, dtype)[rank::world].chunk(parts, dim=1):
            loss = wrapped(x) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(total)
            equal = equal and same_on_all_ranks(model)
        trace.append(float(total) / world)
    return {"losses": trace, "equal": equal, "buffers": buffers_of(model)}


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [
        buffer.detach().clone()
        for module in model.modules()
        if isinstance(module, StepStatistics)
        for name, buffer in module.named_buffers()
        if not name.startswith("last")
    ]


def same_on_all_ranks(model: nn.Module) -> bool:
    """Compare the running values of all ranks bit for bit."""
    for buffer in buffers_of(model):
        everyone = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, buffer)
        if any(not torch.equal(one, buffer) for one in everyone):
            return False
    return True
