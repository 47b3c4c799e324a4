"""Add a training batch to the pending statistics, which the next optimizer step uses.

A training forward calls `record_batch` (means of each cluster) or `record_count` (numbers alone).
Both ADD, so that all micro-batches of a gradient accumulation count, and both do nothing while a
backward runs: activation checkpointing then repeats a forward that was already counted. Compiled
code calls them as custom ops, so that this is decided when it runs and not when it is traced: a
compiled block may run once in a forward and once more in the backward of a checkpoint around it.

C clusters, X statistics of each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op, transforming
from acmoe.ops.statistics import cpu

LEAST = 2  # tokens of a cluster; a single one has dispersion 0, which carries no information

Pending = tuple[Tensor, Tensor]  # means (C, D) and counts (C,) of pending batches


def replaying() -> bool:
    """Return True inside a backward, where a forward is a repetition by activation checkpointing.

    Host code, without a device sync. In a captured CUDA graph it has the value of the capture.
    """
    return torch._C._current_graph_task_id() != -1


def _traced(*tensors: Tensor) -> bool:
    """Return True if a custom op is needed: for `torch.compile`, and for fake tensors."""
    return torch.compiler.is_compiling() or any(type(one) is not Tensor for one in tensors)


def write(into: Callable[..., Any], *arguments: Any) -> None:
    """Call `into(*arguments)`, which writes statistics in place; explain the error of a transform.

    `torch.func` lets a function write only to its arguments. It works if the transform gets the
    buffers of a module as arguments (an ensemble), and raises an error if they are in the module.
    """
    try:
        into(*arguments)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not transforming():
            raise
        raise UserError(
            "a layer in training mode records statistics in its buffers, which vmap, grad and "
            "other transforms of torch.func cannot write; call layer.eval(), or give the buffers "
            "to the transform (torch.func.stack_module_state, functional_call)"
        ) from error


def capturing(x: Tensor) -> bool:
    """Return True while a CUDA graph of work on x is captured: the host must not read x then."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def snapshot(buffer: Tensor, dtype: torch.dtype, *, training: bool) -> Tensor:
    """Return the values of a buffer in a dtype, in a tensor that later updates do not change.

    A captured evaluation gets the buffer itself: its graph would copy it in every replay, and the
    result of a graph is valid until the next replay only.
    """
    if buffer.dtype == dtype and (training or not capturing(buffer)):
        return buffer.clone()
    return buffer.to(dtype)


@op
@torch.no_grad()
def add_batch(mean_CX: Tensor, count_C: Tensor, new_CX: Tensor, new_C: Tensor, least: int) -> None:
    """Merge the means `new_CX` of `new_C` tokens into `mean_CX` of `count_C` tokens, in place.

    The result is the mean weighted by token counts, mean += (new - mean) * new_C / (count + new_C).
    Where the count is 0 the mean becomes exactly `new_CX`. A cluster with fewer than `least` new
    tokens, or with a non-finite statistic, keeps mean and count.
    """
    new_CX = new_CX.to(mean_CX.dtype)  # first: a float64 number may be too large for the mean
    used_C = (new_C >= least) & ((new_CX * 0).sum(-1) == 0)  # 0 * NaN and 0 * inf are NaN
    # torch.where instead of a share of 0: 0 * NaN would carry a NaN of the batch into the mean.
    value_CX = torch.where(used_C[:, None], new_CX, mean_CX)
    added_C = torch.where(used_C, new_C, 0.0)
    count_C.add_(added_C)
    share_C = torch.where(used_C, added_C / count_C, 0.0).to(mean_CX.dtype)
    mean_CX.lerp_(value_CX, share_C[:, None])  # exactly the end where the share is 1


def _batch_unsupported(
    mean_CX: Tensor, count_C: Tensor, new_CX: Tensor, new_C: Tensor
) -> str | None:
    tensors = (mean_CX, count_C, new_CX, new_C)
    if not all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        return "its kernel takes contiguous float32 statistics"
    return triton_unsupported(mean_CX)


@add_batch.register("triton", unsupported=_batch_unsupported, by_triton=True)
@torch.no_grad()
def _add_batch_triton(
    mean_CX: Tensor, count_C: Tensor, new_CX: Tensor, new_C: Tensor, least: int
) -> None:
    from acmoe.ops.statistics.triton.pending import add_batch as launch

    launch(mean_CX, count_C, new_CX, new_C, least)


def _batch_not_on_cpu(
    mean_CX: Tensor, count_C: Tensor, new_CX: Tensor, new_C: Tensor
) -> str | None:
    tensors = (mean_CX, count_C, new_CX, new_C)
    if not all(tensor.dtype == torch.float32 for tensor in tensors):
        return "its kernel takes float32 statistics"
    return cpu.unsupported(*tensors)


add_batch.register("cpu", unsupported=_batch_not_on_cpu)(cpu.add_batch)


def record_batch(
    mean_CX: Tensor, count_C: Tensor, new_CX: Tensor, new_C: Tensor, *, least: int = 1
) -> None:
    """Call `add_batch` on statistics of a training forward, unless the forward is a repetition."""
    arguments = (mean_CX, count_C, new_CX.detach(), new_C.detach(), least)
    if _traced(mean_CX, new_CX):
        record_batch_op(*arguments)
    elif not replaying():
        write(add_batch, *arguments)


@torch.library.custom_op("acmoe::record_batch", mutates_args=("mean", "count"))
def record_batch_op(
    mean: Tensor, count: Tensor, new: Tensor, new_count: Tensor, least: int
) -> None:
    if not replaying():
        add_batch(mean, count, new, new_count, least)


@record_batch_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None


def record_count(count_C: Tensor, new_C: Tensor) -> None:
    """Add `new_C` to `count_C` in place, unless this forward is a repetition."""
    if _traced(count_C, new_C):
        record_count_op(count_C, new_C.detach())
    elif not replaying():
        write(count_C.add_, new_C.detach())


@torch.library.custom_op("acmoe::record_count", mutates_args=("count",))
def record_count_op(count: Tensor, new_count: Tensor) -> None:
    if not replaying():
        count.add_(new_count)


@record_count_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None
