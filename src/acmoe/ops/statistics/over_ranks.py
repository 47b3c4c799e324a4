"""Sums and dispersions over the tokens of several processes, by `torch.distributed`.

Both are custom ops: `torch.compile` sees one call, and activation checkpointing saves their results
(ops/recompute.py), so that a recompute communicates nothing. A group is given by its name, as in
torch's functional collectives. They have no gradient.

T tokens of this process, D features, C clusters.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from acmoe.ops.statistics.dispersion import accumulation_dtype


def process_group(name: str) -> ProcessGroup:
    """Return the process group of that name."""
    found: ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return found


def is_distributed() -> bool:
    """Return True if torch.distributed runs, also with a single process."""
    return dist.is_initialized()


def world_size() -> int:
    """Return the number of processes that torch.distributed runs, 1 without it.

    Every training forward calls it. `is_initialized` reaches the default group through three Python
    functions; reading it where torch keeps it takes none.
    """
    if not torch.compiler.is_dynamo_compiling():
        world = getattr(distributed_c10d, "_world", None)
        if getattr(world, "_default_pg", distributed_c10d) is None:
            return 1
    return dist.get_world_size() if dist.is_initialized() else 1


def everyone() -> str:
    """Return the name of the group of all processes."""
    world = dist.group.WORLD
    assert world is not None
    return str(world.group_name)


def add_up(value: Tensor, group: str) -> None:
    """Replace the value by its sum over the processes of the group, in place."""
    dist.all_reduce(value, group=process_group(group))


def of_each_rank(value: object, group: str) -> list[object]:
    """Return the values that the processes of the group gave, by rank."""
    found: list[object] = [None] * process_group(group).size()
    dist.all_gather_object(found, value, group=process_group(group))
    return found


@torch.library.custom_op("acmoe::sum_over_ranks", mutates_args=())
def sum_over_ranks(value: Tensor, group: str) -> Tensor:
    """Return the sum of `value` over the processes of the group."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group(group))
    return total


@sum_over_ranks.register_fake
def _(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@torch.library.custom_op("acmoe::dispersion_over_ranks", mutates_args=())
def dispersion_over_ranks(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    measure: str,
    token_mask_T: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return the (C, D) dispersion and the (C,) token counts of the tokens of all processes.

    Two reductions: counts and sums, in float64, so that equal tokens on all ranks have dispersion 0
    exactly and a large common offset costs no digits; then deviations from the common mean.
    """
    C, members = num_clusters, process_group(group)
    outside_T = cluster_T < 0
    if token_mask_T is not None:
        outside_T = outside_T | ~token_mask_T
    x_TD = x_TD.detach().to(accumulation_dtype(x_TD.dtype)).masked_fill(outside_T[:, None], 0.0)
    cluster_T = cluster_T.masked_fill(outside_T, C)
    member_TC = cluster_T[:, None] == torch.arange(C, device=x_TD.device)
    sums_CD = member_TC.mT.double() @ x_TD.double()
    first_CX = torch.cat([member_TC.sum(0, dtype=torch.float64)[:, None], sums_CD], dim=1)
    dist.all_reduce(first_CX, group=members)
    count_C, mean_CD = first_CX[:, 0], first_CX[:, 1:] / first_CX[:, :1].clamp(min=1)
    away_TD = x_TD - mean_CD.to(x_TD.dtype)[cluster_T.clamp(max=C - 1)]
    away_TD = away_TD.abs() if measure == "mad" else away_TD.square()
    spread_CD = member_TC.mT.to(away_TD.dtype) @ away_TD
    dist.all_reduce(spread_CD, group=members)
    spread_CD = spread_CD / count_C.clamp(min=1)[:, None].to(spread_CD.dtype)
    if measure == "std":
        spread_CD = spread_CD.sqrt()
    return spread_CD, count_C.to(torch.float32)


@dispersion_over_ranks.register_fake
def _(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    measure: str,
    token_mask_T: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor]:
    spread = x_TD.new_empty(num_clusters, x_TD.shape[1], dtype=accumulation_dtype(x_TD.dtype))
    return spread, x_TD.new_empty(num_clusters, dtype=torch.float32)
