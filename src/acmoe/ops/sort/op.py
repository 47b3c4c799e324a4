"""Register the kernels of the op `sort_rows`: counting sorts on a GPU and in C, numpy's on a CPU.

T tokens, K experts per token, N = T * K rows, E experts, C = E clusters.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acmoe.ops.checks import host_may_read
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import eager
from acmoe.ops.empty import shared_empty
from acmoe.ops.native import library
from acmoe.ops.sort.native import sorted_rows
from acmoe.ops.sort.order import header_size, no_order, num_slots
from acmoe.ops.sort.reference import Rows, sort_rows
from acmoe.ops.taped import taped

_MOST_EXPERTS = 2**15  # ids up to this number fit int16
_FEW_ROWS = 64  # rows up to which 64-bit ids are sorted as fast as 16-bit ones


def unsupported(expert_ids: Tensor) -> str | None:
    """Return the reason why the kernels cannot serve this call, or None."""
    if expert_ids.numel() == 0:
        return "there are no tokens"
    return triton_unsupported(expert_ids, any_dtype=True)


@sort_rows.register("triton", unsupported=unsupported, by_triton=True)
def _sort_rows_triton(
    expert_ids: Tensor,
    num_experts: int,
    *,
    cluster: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Rows:
    if cluster is None:
        if eager(expert_ids):
            found = taped(launched_sort, (expert_ids,), (num_experts,))
            order = shared_empty((0,), torch.int32, expert_ids.device)
        else:
            found, order = sort_op(expert_ids, num_experts), no_order(expert_ids)
        permutation, inverse, offsets, expert = found
        return Rows(permutation, inverse, offsets, expert, order)
    if token_mask is not None:
        cluster = cluster.masked_fill(~token_mask, -1)
    both = _eager_sort_with_tokens if eager(expert_ids, cluster) else sort_with_tokens_op
    return Rows(*both(expert_ids, cluster, num_experts))


def _not_on_cpu(expert_ids: Tensor, num_experts: int) -> str | None:
    if expert_ids.device.type != "cpu":
        return "it is for CPUs"
    if expert_ids.dtype != torch.int64 or num_experts >= _MOST_EXPERTS:
        return f"its kernel takes int64 ids of fewer than {_MOST_EXPERTS:,} experts"
    return None if host_may_read(expert_ids) else "it is traced, or there are no tokens"


def _not_native(expert_ids: Tensor, num_experts: int) -> str | None:
    reason = _not_on_cpu(expert_ids, num_experts)
    if reason is not None:
        return reason
    return library.missing() if expert_ids.is_contiguous() else "it takes contiguous ids"


@sort_rows.register("native", unsupported=_not_native)
def _sort_rows_native(
    expert_ids: Tensor,
    num_experts: int,
    *,
    cluster: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Rows:
    rows = sorted_rows(expert_ids, num_experts)
    return _sort_rows_cpu(expert_ids, num_experts) if rows is None else rows


@sort_rows.register("cpu", unsupported=_not_on_cpu)
def _sort_rows_cpu(
    expert_ids: Tensor,
    num_experts: int,
    *,
    cluster: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Rows:
    """Sort by numpy, which sorts 16-bit integers by radix and has faster calls than torch."""
    ids_N = expert_ids.numpy().reshape(-1)
    few = len(ids_N) <= _FEW_ROWS  # a 16-bit copy of so few ids takes longer than it saves
    permutation_N = (ids_N if few else ids_N.astype(np.int16)).argsort(kind="stable")
    expert_N = ids_N.take(permutation_N)
    if few:  # sorting the permutation is faster than the two calls below
        inverse_N = permutation_N.argsort(kind="stable")
    else:
        inverse_N = np.empty_like(permutation_N)
        inverse_N[permutation_N] = np.arange(len(ids_N))
    offsets_E = expert_N.searchsorted(_numbers(num_experts), side="right")
    return Rows(
        torch.from_numpy(permutation_N),
        torch.from_numpy(inverse_N),
        torch.from_numpy(offsets_E),
        torch.from_numpy(expert_N),
        shared_empty((0,), torch.int32, expert_ids.device),
    )


@functools.lru_cache(maxsize=8)
def _numbers(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(count)


def launched_sort(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return permutation (N,), inverse (N,), offsets (E,) and the sorted expert ids (N,)."""
    from acmoe.ops.sort.triton.sort import sort_rows as launch

    return launch(expert_ids, num_experts)


def launched_sort_with_tokens(
    expert_ids: Tensor, cluster: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `launched_sort` and the `TokenOrder`, from the same launches."""
    from acmoe.ops.sort.triton.sort import sort_rows_and_tokens as launch

    rows, order = launch(expert_ids, cluster, num_experts)
    return *rows, order


def _eager_sort_with_tokens(
    expert_ids: Tensor, cluster: Tensor, num_experts: int
) -> tuple[Tensor, ...]:
    return taped(launched_sort_with_tokens, (expert_ids, cluster), (num_experts,))


@torch.library.custom_op("acmoe::sort_rows", mutates_args=())
def sort_op(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `launched_sort`."""
    return launched_sort(expert_ids, num_experts)


@sort_op.register_fake
def _(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = expert_ids.numel()
    return (
        expert_ids.new_empty(rows),
        expert_ids.new_empty(rows),
        expert_ids.new_empty(num_experts),
        expert_ids.new_empty(rows),
    )


@torch.library.custom_op("acmoe::sort_rows_and_tokens", mutates_args=())
def sort_with_tokens_op(
    expert_ids: Tensor, cluster: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `launched_sort_with_tokens`."""
    return launched_sort_with_tokens(expert_ids, cluster, num_experts)


@sort_with_tokens_op.register_fake
def _(
    expert_ids: Tensor, cluster: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = expert_ids.numel()
    slots = 2 * header_size(num_experts) + num_slots(cluster.numel(), num_experts)
    return (
        expert_ids.new_empty(rows),
        expert_ids.new_empty(rows),
        expert_ids.new_empty(num_experts),
        expert_ids.new_empty(rows),
        cluster.new_empty(slots, dtype=torch.int32),
    )
