"""Routed rows sorted by expert, as a custom op over the counting-sort kernels."""

import torch
from torch import Tensor


@torch.library.custom_op("acmoe::sort_rows", mutates_args=())
def sort_rows(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order (N,), back (N,), end (E,) and the sorted experts (N,)."""
    from acmoe.kernels.order import sort_rows as launch

    order, back, end, expert, _ = launch(expert_ids, num_experts)
    return order, back, end, expert


@sort_rows.register_fake
def _(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = expert_ids.numel()
    return (
        expert_ids.new_empty(rows),
        expert_ids.new_empty(rows),
        expert_ids.new_empty(num_experts),
        expert_ids.new_empty(rows),
    )
