"""Measure the clusters of a call, and in training add them to the pending statistics.

The results are those of `measure_dispersion` or `measure_scale`, and then `record_batch`. Where
Triton's kernels serve an eager call, all of its launches are repeated from one tape
(ops/device/tape.py), whose memory holds the batch: that takes less of the host's time. There, and
on a CPU, the kernel adds what it measured itself.

D features, C clusters; all leading dimensions of x count tokens.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from acmoe.ops.checks import check_clusters, check_tokens
from acmoe.ops.device_support import interpreting
from acmoe.ops.dispatch import eager, transforming
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics import cpu, native, scale_op, sorted_op
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.dispersion_op import as_sets
from acmoe.ops.statistics.op import measure_dispersion, measure_scale
from acmoe.ops.statistics.pending import LEAST, Pending, record_batch, replaying, snapshot
from acmoe.ops.statistics.scale import ScaleOptions, scale_of
from acmoe.ops.taped import taped

# Kernels that add what they measured to the pending means themselves.
_ADDING_DISPERSION: dict[str, Callable[..., Any]] = {
    "native": native.add_dispersion,
    "cpu": cpu.measured_dispersion,
}
_ADDING_SCALE: dict[str, Callable[..., Tensor]] = {
    "native": native.measured_scale,
    "cpu": cpu.measured_scale,
}


def record_dispersion(
    pending: Pending,
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor | None:
    """Add the dispersion of each cluster of x (..., D) to the pending means, in place.

    Return a `snapshot` of the scale `known` (C, D), if any: a kernel copies it on the way. The
    other arguments are those of `measure_dispersion`.
    """
    tokens = (x, assignment, token_mask, order)
    launches = not x.is_cpu or interpreting()
    if launches and measure in scale_op.SCALE_MEASURES and _one_tape(pending, *tokens):
        kernel = measure_dispersion.select(x, assignment, num_clusters, measure=measure)
        if kernel.name == "triton":
            runs = scale_op.launched_dispersion, sorted_op.launched_dispersion
            copied = known if _can_copy(known, pending) else None
            found = _repeated(runs, pending, tokens, num_clusters, (measure,), copied)
            return found[0] if found else _snapshot(known, x)
    _record_dispersion(pending, *tokens, num_clusters, measure)
    return _snapshot(known, x)


def _can_copy(known: Tensor | None, pending: Pending) -> bool:
    """Return True if a kernel that adds to `pending` may copy `known`, too."""
    if known is None or not eager(known) or known.requires_grad:
        return False
    like = pending[0]
    same = (known.shape, known.dtype, known.device) == (like.shape, like.dtype, like.device)
    return same and known.is_contiguous()


def _snapshot(known: Tensor | None, x: Tensor) -> Tensor | None:
    return None if known is None else snapshot(known, accumulation_dtype(x.dtype), training=True)


def _record_dispersion(
    pending: Pending,
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    order: Tensor | None,
    num_clusters: int,
    measure: str,
) -> None:
    """Do what `record_dispersion` does, without one tape for all of its launches."""
    x_TD = x if x.dim() == 2 else x.flatten(0, -2)
    cluster_T = assignment if assignment.dim() == 1 else assignment.flatten()
    mask_T = None if token_mask is None else token_mask.flatten()
    given = (x_TD, cluster_T, num_clusters)
    named: dict[str, Any] = {"measure": measure, "token_mask": mask_T, "order": order}
    if _added_on_cpu(pending):
        add = _ADDING_DISPERSION.get(measure_dispersion.select(*given, **named).name)
        if add is not None:
            add(*given, measure=measure, add_to=(*pending, LEAST))
            return
    if transforming():  # under vmap, results may have a batch that this memory lacks
        batch = measure_dispersion(*given, **named)
    else:
        batch = torch.empty_like(pending[0]), torch.empty_like(pending[1])
        measure_dispersion(*given, **named, out=batch)
    record_batch(*pending, *batch, least=LEAST)


def record_scale(
    pending: Pending | None,
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Return the scale (C, D) of the clusters of x (..., D), and add their dispersion to `pending`.

    pending: the means and counts that change in place; None: add nothing. The other arguments are
    those of `measure_scale`.
    """
    tokens = (x, assignment, token_mask, order)
    launches = not x.is_cpu or interpreting()
    if launches and options.transform is None and _one_tape(pending, *tokens, options.chosen):
        kernel = measure_scale.select(x, assignment, num_clusters, options, measure=measure)
        if kernel.name == "triton":
            runs = scale_op.launched_scale, sorted_op.launched_scale
            settings = scale_op.ScaleSettings.of(measure, options)
            return _repeated(runs, pending, tokens, num_clusters, settings, options.chosen)[0]
    x_TD = x if x.dim() == 2 else x.flatten(0, -2)
    cluster_T = assignment if assignment.dim() == 1 else assignment.flatten()
    mask_T = None if token_mask is None else token_mask.flatten()
    given = (x_TD, cluster_T, num_clusters, options)
    named: dict[str, Any] = {"measure": measure, "token_mask": mask_T, "order": order}
    if _added_on_cpu(pending):
        scaled = _ADDING_SCALE.get(measure_scale.select(*given, **named).name)
        if scaled is not None:
            return scaled(*given, measure=measure, add_to=(*pending, LEAST))
    if pending is not None and transforming():
        found = measure_dispersion(*given[:-1], **named)
        record_batch(*pending, *found, least=LEAST)
        return scale_of(*found, options)
    batch = pending and (torch.empty_like(pending[0]), torch.empty_like(pending[1]))
    scale = measure_scale(*given, **named, out=batch)
    if pending is not None and batch is not None:
        record_batch(*pending, *batch, least=LEAST)
    return scale


def _added_on_cpu(pending: Pending | None) -> TypeGuard[Pending]:
    """Return True if a CPU kernel may add this batch to the pending means.

    The caller checks whether such a kernel serves the call, which it does not if something observes
    the call. The kernel may not add inside a backward, where activation checkpointing repeats a
    forward that was already counted (see `record_batch`).
    """
    if pending is None or is_dynamo_compiling() or not pending[0].is_cpu:
        return False
    for one in pending:
        if type(one) is not Tensor or one.dtype != torch.float32:
            return False
    return not replaying()


def _one_tape(pending: Pending | None, x: Tensor, *rest: Tensor | None) -> bool:
    """Return True if one tape may hold the whole call, provided that a kernel serves it.

    A tape records no gradient, and it always adds the batch, so it may not serve a forward that a
    backward repeats. Under transforms of `torch.func`, `select` returns the definition.
    """
    if not eager(x, *rest, *(pending or ())) or records_gradient(x):
        return False
    if pending is None:
        return True
    means, counts = pending
    plain = means.dtype == counts.dtype == torch.float32
    return plain and means.is_contiguous() and counts.is_contiguous() and not replaying()


def _repeated(
    runs: tuple[Callable[..., Any], Callable[..., Any]],
    pending: Pending | None,
    tokens: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    num_clusters: int,
    settings: tuple[Any, ...],
    beside: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the results of one of `runs`, for tokens in any order or sorted, by a tape.

    beside: the tensor that a launch reads beside the tokens, `known` or `chosen`.
    """
    x, assignment, token_mask, order = tokens
    others = (*(pending or (None, None)), beside)
    if order is not None and order.numel() > 0:
        constants = (num_clusters, runs[1], settings)
        return taped(_run_sorted, (x, order, *others), constants)
    check_clusters(assignment, num_clusters)
    constants = (num_clusters, runs[0], settings)
    return taped(_run_unsorted, (x, assignment, token_mask, *others), constants)


def _run_unsorted(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    mean_CD: Tensor | None,
    count_C: Tensor | None,
    beside: Tensor | None,
    num_clusters: int,
    launched: Callable[..., tuple[Tensor, ...]],
    settings: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    check_tokens(x, assignment, token_mask)
    mask_T = None if token_mask is None else token_mask.flatten()
    sets = as_sets(_all_tokens(x), assignment.flatten(), mask_T)
    batch = _new_batch(x, num_clusters)
    return launched(*sets, beside, *batch, *settings, pending=_both(mean_CD, count_C))


def _run_sorted(
    x: Tensor,
    order: Tensor,
    mean_CD: Tensor | None,
    count_C: Tensor | None,
    beside: Tensor | None,
    num_clusters: int,
    launched: Callable[..., tuple[Tensor, ...]],
    settings: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    clusters = TokenOrder.unpack(order, num_clusters)
    assert clusters is not None
    x_TD = _all_tokens(x)
    sorted_op.check_sorted(x_TD, clusters, settings[0])
    batch = _new_batch(x, num_clusters)
    both = _both(mean_CD, count_C)
    return launched(x_TD, *clusters, beside, *batch, *settings, pending=both)


def _both(mean_CD: Tensor | None, count_C: Tensor | None) -> Pending | None:
    return None if mean_CD is None or count_C is None else (mean_CD, count_C)


def _all_tokens(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2)


def _new_batch(x: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Return float32 memory for the dispersion (C, D) and the token counts (C,) of a batch.

    Each repetition of a tape (ops/device/tape.py) allocates it anew.
    """
    spread_CD = x.new_empty((num_clusters, x.shape[-1]), dtype=torch.float32)
    return spread_CD, spread_CD.new_empty(num_clusters)
