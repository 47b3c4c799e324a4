"""Measure the clusters of a training forward, and add the batch to the statistics that wait.

The results are those of `measure_dispersion` or `measure_scale`, and then `record_batch`. Where
Triton's kernels serve an eager call, all of its launches are repeated from one tape
(ops/device/tape.py), whose memory holds the batch: that takes a third of the host's time.

D features, C clusters; all leading dimensions of x count tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acmoe.ops.checks import check_tokens
from acmoe.ops.dispatch import eager, interpreting
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics import scale_op, sorted_op
from acmoe.ops.statistics.dispersion_op import as_sets, check_clusters
from acmoe.ops.statistics.op import ScaleOptions, measure_dispersion, measure_scale
from acmoe.ops.statistics.pending import record_batch, replaying

LEAST = 2  # tokens of a cluster; a single one has dispersion 0, which carries no information

Waiting = tuple[Tensor, Tensor]  # means (C, D) and counts (C,)


def record_dispersion(
    waiting: Waiting,
    x: Tensor,
    assignment: Tensor,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
) -> None:
    """Add the dispersion of each cluster of x (..., D) to the waiting means, in place.

    The other arguments are those of `measure_dispersion`.
    """
    tokens = (x, assignment, token_mask, order)
    if measure in scale_op.SCALE_MEASURES and _one_tape(waiting, *tokens):
        kernel = measure_dispersion.select(x, assignment, len(waiting[1]), measure=measure)
        if kernel.name == "triton":
            runs = scale_op.launched_dispersion, sorted_op.launched_dispersion
            _repeated(runs, waiting, *tokens, (measure,))
            return
    batch = _new_batch(waiting)
    measure_dispersion(
        *(_all_tokens(x), assignment.flatten(), len(waiting[1])),
        measure=measure,
        token_mask=None if token_mask is None else token_mask.flatten(),
        order=order,
        out=batch,
    )
    record_batch(*waiting, *batch, least=LEAST)


def record_scale(
    waiting: Waiting,
    x: Tensor,
    assignment: Tensor,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Return the scale (C, D) of x (..., D), and add its dispersion to the waiting means, in place.

    The other arguments are those of `measure_scale`.
    """
    tokens = (x, assignment, token_mask, order)
    if options.transform is None and _one_tape(waiting, *tokens):
        kernel = measure_scale.select(x, assignment, len(waiting[1]), options, measure=measure)
        if kernel.name == "triton":
            runs = scale_op.launched_scale, sorted_op.launched_scale
            settings = (measure, options.normalize, options.floor, options.eps)
            settings += (options.clamp, options.min_tokens)
            return _repeated(runs, waiting, *tokens, settings)[0]
    batch = _new_batch(waiting)
    scale = measure_scale(
        *(_all_tokens(x), assignment.flatten(), len(waiting[1]), options),
        measure=measure,
        token_mask=None if token_mask is None else token_mask.flatten(),
        order=order,
        out=batch,
    )
    record_batch(*waiting, *batch, least=LEAST)
    return scale


def _one_tape(waiting: Waiting, x: Tensor, *rest: Tensor | None) -> bool:
    """Return True if a call may be one tape, if a kernel serves it.

    A tape records no gradient, and it always adds the batch: a forward that a backward repeats was
    counted already.
    """
    if not (x.is_cuda or interpreting()) or not eager(x, *rest, *waiting):
        return False
    plain = all([one.dtype == torch.float32 and one.is_contiguous() for one in waiting])
    return plain and not replaying() and not (x.requires_grad and torch.is_grad_enabled())


def _repeated(
    runs: tuple[Callable[..., Any], Callable[..., Any]],
    waiting: Waiting,
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    order: Tensor | None,
    settings: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """Return the results of one of `runs`, for tokens in any order or sorted, by a tape."""
    if order is not None and order.numel() > 0:
        return scale_op.taped_into(_run_sorted, (x, order, *waiting), (runs[1], settings))
    check_clusters(assignment, len(waiting[1]))
    tensors = (x, assignment, token_mask, *waiting)
    return scale_op.taped_into(_run_unsorted, tensors, (runs[0], settings))


def _run_unsorted(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    mean_CD: Tensor,
    count_C: Tensor,
    launched: Callable[..., tuple[Tensor, ...]],
    settings: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    check_tokens(x, assignment, token_mask)
    mask_T = None if token_mask is None else token_mask.flatten()
    sets = as_sets(_all_tokens(x), assignment.flatten(), mask_T)
    batch = _new_batch((mean_CD, count_C))
    found = launched(*sets, *batch, *settings)
    _add(mean_CD, count_C, batch)
    return found


def _run_sorted(
    x: Tensor,
    order: Tensor,
    mean_CD: Tensor,
    count_C: Tensor,
    launched: Callable[..., tuple[Tensor, ...]],
    settings: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    clusters = TokenOrder.unpack(order, len(count_C))
    assert clusters is not None
    x_TD = _all_tokens(x)
    sorted_op.check_sorted(x_TD, clusters, settings[0])
    batch = _new_batch((mean_CD, count_C))
    found = launched(x_TD, *clusters, *batch, *settings)
    _add(mean_CD, count_C, batch)
    return found


def _add(mean_CD: Tensor, count_C: Tensor, batch: tuple[Tensor, Tensor]) -> None:
    from acmoe.ops.statistics.triton.pending import add_batch

    add_batch(mean_CD, count_C, *batch, LEAST)


def _all_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _new_batch(waiting: Waiting) -> tuple[Tensor, Tensor]:
    """Return memory for the dispersion (C, D) and the token counts (C,) of a batch."""
    mean_CD, count_C = waiting
    return torch.empty_like(mean_CD), torch.empty_like(count_C)
