"""From partial sums to dispersion and scale (B, C, D): the Triton form of ops/statistics/scale.py.

One program per cluster reduces the partials of all token splits (dispersion.py) and runs the
epilogue; the kernels for sorted tokens (sorted_dispersion.py) and for the token lists of many sets
(set_dispersion.py) run the same epilogue themselves. Where each cluster is normalised by itself
(normalize="cluster" without clamp, the default) the epilogue writes the scale. The other
normalisations compare clusters and take one more launch, and so do means that end at the last
chosen cluster (mean_over="chosen").

    reduce partials   P C D partials read, 2 C D written (float32)
    normalise         C D read, C D written; with a clamp every program also reads all C D from L2,
                      for the mean of the clamped weights
Arithmetic is float64, as in ../scale.py: reciprocals of tiny dispersions overflow float32.

B sets of clusters, C clusters, D features, P splits.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.statistics.pending import Pending
from acmoe.ops.statistics.triton.dispersion import Partials
from acmoe.ops.statistics.triton.epilogue import (
    ROW_STATISTICS,
    Epilogue,
    Outputs,
    clamp_to_float32,
    cluster_epilogue,
)
from acmoe.ops.statistics.triton.set_dispersion import SetTokens, measure_sets
from acmoe.ops.statistics.triton.sorted_dispersion import SortedTokens, measure_sorted

if TYPE_CHECKING:
    from acmoe.ops.statistics.scale_op import ScaleSettings

# Elements (clusters x features) of one program of the normalising kernel.
NORMALISE_TILE = 2048

StatsInput = Partials | SortedTokens | SetTokens


def reduce_to_dispersion(
    stats_input: StatsInput,
    *,
    root: bool,
    into: tuple[Tensor, Tensor] | None = None,
    pending: Pending | None = None,
    known: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dispersion (B, C, D) and count (B, C), float32, and a copy of `known`.

    root: take the square root (std from variance). into: contiguous tensors to write both into.
    pending: means (C, D) and counts (C,) to add a single set's dispersion to (pending.py). known:
    contiguous float32 numbers (C, D), or None.
    """
    spread_BCD, count_BC = into or _allocate(stats_input)
    copied = None if known is None else torch.empty_like(spread_BCD)
    out = spread_BCD if copied is None else copied  # a dispersion alone writes nothing to it
    outputs = Outputs(spread_BCD, count_BC, out, *(pending or (None, None)), known)
    _reduce(stats_input, outputs, Epilogue("dispersion" if known is None else "copy", root))
    return spread_BCD, count_BC, copied


def reduce_to_scale(
    stats_input: StatsInput,
    settings: "ScaleSettings",
    *,
    into: tuple[Tensor | None, Tensor] | None = None,
    pending: Pending | None = None,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return scale and dispersion (B, C, D) and count (B, C); see `reduce_to_dispersion`.

    into: its dispersion may be None for `SetTokens`, if nobody reads it. chosen: (C,), not 0 for
    chosen clusters; settings.mean_over="chosen" reads it. None: clusters with tokens.
    """
    spread_BCD, count_BC = into or _allocate(stats_input)
    if spread_BCD is None and not settings.is_separable():
        spread_BCD, _ = _allocate(stats_input)
    scale_BCD = count_BC.new_empty(*count_BC.shape, stats_input[0].shape[-1])
    out = scale_BCD
    if not settings.is_separable():
        sizes = (*count_BC.shape, ROW_STATISTICS.value)
        out = count_BC.new_empty(sizes, dtype=torch.float64)
    outputs = Outputs(spread_BCD, count_BC, out, *(pending or (None, None)))
    options = settings.floor, settings.eps, settings.min_tokens
    result, root = "scale" if settings.is_separable() else "rows", settings.measure == "std"
    _reduce(stats_input, outputs, Epilogue(result, root, *options))
    if not settings.is_separable():
        _normalise(outputs, scale_BCD, settings, chosen)
    return scale_BCD, spread_BCD, count_BC


def _normalise(
    outputs: Outputs, scale_BCD: Tensor, settings: "ScaleSettings", chosen: Tensor | None
) -> None:
    """Write the scale of a normalisation that compares clusters; outputs.out: ROW_STATISTICS."""
    B, C, D = scale_BCD.shape
    BC = next_power_of_2(C)
    BD = max(16, min(next_power_of_2(D), NORMALISE_TILE // BC))
    # Clusters with tokens are those of each set, chosen ones those of all sets.
    strides = (C, 1) if chosen is None else (0, chosen.stride(0))
    chosen = outputs.count if chosen is None else chosen
    if chosen.dtype == torch.bool:
        chosen = chosen.view(torch.uint8)
    launch(
        _normalise_kernel, (B, cdiv(D, BD)), outputs.dispersion, outputs.out, chosen, scale_BCD,
        *strides, C, D, settings.floor, settings.eps, settings.clamp or 0.0,
        NORMALIZE=settings.normalize, CLAMPED=settings.clamp is not None,
        MEAN_BEFORE=settings.mean_before_clamp, TO_LAST=settings.mean_over == "chosen", BC=BC,
        BD=BD, num_warps=8,
    )  # fmt: skip


def _allocate(stats_input: StatsInput) -> tuple[Tensor, Tensor]:
    """Allocate the outputs: dispersion (B, C, D) and count (B, C)."""
    if isinstance(stats_input, SortedTokens):
        B, C, D = 1, stats_input.begin.numel() - 1, stats_input.x.shape[1]
    elif isinstance(stats_input, SetTokens):
        B, C, D = stats_input.x.shape[0], stats_input.num_clusters, stats_input.x.shape[2]
    else:
        B, _, C, D = stats_input.spread.shape
    new = partial(stats_input[0].new_empty, dtype=torch.float32)
    return new(B, C, D), new(B, C)


def _reduce(stats_input: StatsInput, outputs: Outputs, epilogue: Epilogue) -> None:
    """Reduce to dispersion and count, and run the epilogue."""
    if isinstance(stats_input, SortedTokens):
        measure_sorted(stats_input, outputs, epilogue)
        return
    if isinstance(stats_input, SetTokens):
        measure_sets(stats_input, outputs, epilogue)
        return
    assert outputs.dispersion is not None
    B, C, D = outputs.dispersion.shape
    width = max(16, next_power_of_2(D))
    launch(
        _reduce_partials_kernel, (B * C,), stats_input.spread, stats_input.count, *outputs, C, D,
        stats_input.spread.shape[1], *epilogue.numbers, **epilogue.flags, BD=width,
        num_warps=8 if width > 2048 else 4,
    )  # fmt: skip


@triton.jit
def _reduce_partials_kernel(
    spread_ptr, count_ptr, dispersion_ptr, tokens_ptr, out_ptr, pending_ptr, pending_count_ptr,
    known_ptr, C, D, P, floor, eps, min_tokens, ROOT: tl.constexpr, RESULT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Reduce one cluster's partials over all token splits, then run the epilogue."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    acc = tl.zeros((BD,), dtype=tl.float64)
    tokens = 0
    for p in tl.range(0, P, loop_unroll_factor=4):  # 4 loads in flight instead of one
        offs = ((row // C) * P + p) * C + row % C
        acc += tl.load(spread_ptr + offs * D + d, mask=d < D, other=0.0).to(tl.float64)
        tokens += tl.load(count_ptr + offs)
    cluster_epilogue(
        acc, tokens, row, d, D, dispersion_ptr, tokens_ptr, out_ptr, pending_ptr,
        pending_count_ptr, known_ptr, floor, eps, min_tokens, ROOT, RESULT,
    )  # fmt: skip


@triton.jit
def _weights(
    dispersion_ptr, set_id, c, d, C, D, mean, informative, floor, eps, highest,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """Return clamped 1 / s of a block of clusters and features; 0 in uninformative clusters."""
    valid = (c[:, None] < C) & (d[None, :] < D) & (informative[:, None] > 0)
    offs = (set_id * C + c)[:, None] * D + d[None, :]
    s = tl.load(dispersion_ptr + offs, mask=valid, other=1.0).to(tl.float64)
    weight = 1.0 / tl.where(valid, tl.maximum(s, floor * mean[:, None]) + eps, 1.0)
    if CLAMPED:
        weight = tl.minimum(weight, highest)
    return tl.where(valid, weight, 0.0)


@triton.jit
def _up_to_last(chosen_ptr, stride, c, C):
    """Return (BC,) 1 for the clusters up to the last one that is chosen, and 0 behind it."""
    chosen = tl.load(chosen_ptr + c * stride, mask=c < C, other=0)
    return (c < tl.max(tl.where(chosen > 0, c + 1, 0))).to(tl.float64)


@triton.jit
def _normalise_kernel(
    dispersion_ptr, rows_ptr, chosen_ptr, scale_ptr, set_stride, chosen_stride, C, D, floor, eps,
    clamp, NORMALIZE: tl.constexpr, CLAMPED: tl.constexpr, MEAN_BEFORE: tl.constexpr,
    TO_LAST: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Divide 1 / s by its mean over features, clusters or both (NORMALIZE); one feature block.

    MEAN_BEFORE: by the mean of the weights before the clamp. TO_LAST: clusters after the last
    chosen one get ones, and enter no mean.
    """
    set_id = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    row_ptr = rows_ptr + (set_id * C + c) * ROW_STATISTICS
    mean = tl.load(row_ptr, mask=c < C, other=0.0)
    informative = tl.load(row_ptr + 1, mask=c < C, other=0.0)
    row_sum = tl.load(row_ptr + 2, mask=c < C, other=0.0)
    if TO_LAST:
        informative *= _up_to_last(chosen_ptr + set_id * set_stride, chosen_stride, c, C)
        row_sum *= informative
    clusters = tl.maximum(tl.sum(informative), 1.0)  # if none is informative, all rows become ones
    highest = clamp * (tl.sum(row_sum) / (clusters * D))
    if CLAMPED and NORMALIZE != "feature" and not MEAN_BEFORE:
        row_sum = tl.zeros((BC,), dtype=tl.float64)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            weight = _weights(
                dispersion_ptr, set_id, c, d, C, D, mean, informative, floor, eps, highest, CLAMPED
            )
            row_sum += tl.sum(weight, axis=1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    weight = _weights(
        dispersion_ptr, set_id, c, d, C, D, mean, informative, floor, eps, highest, CLAMPED
    )
    if NORMALIZE == "cluster":
        scale = weight / tl.where(informative > 0, row_sum / D, 1.0)[:, None]
    elif NORMALIZE == "feature":
        averaged = weight
        if CLAMPED and MEAN_BEFORE:
            averaged = _weights(
                dispersion_ptr, set_id, c, d, C, D, mean, informative, floor, eps, highest, False
            )
        column = tl.sum(averaged, axis=0)
        scale = weight / tl.where(column > 0, column / clusters, 1.0)[None, :]
    else:
        overall = tl.sum(row_sum)
        scale = weight / tl.where(overall > 0, overall / (clusters * D), 1.0)
    scale = tl.where(informative[:, None] > 0, clamp_to_float32(scale), 1.0)
    offs = (set_id * C + c)[:, None] * D + d[None, :]
    valid = (c[:, None] < C) & (d[None, :] < D)
    tl.store(scale_ptr + offs, scale.to(tl.float32), mask=valid)
