"""From partial sums to dispersion and scale (B, C, D): the Triton form of ops/statistics/scale.py.

One program per cluster reduces the partials of all token splits (dispersion.py) and runs the
epilogue; the kernel for sorted tokens runs the same epilogue itself (sorted_dispersion.py). Where
each cluster is normalised by itself (normalize="cluster" without clamp, the default) the epilogue
writes the scale. The other normalisations compare clusters and take one more launch.

    reduce partials   P C D partials read, 2 C D written (float32)
    normalise         C D read, C D written; with a clamp every program also reads all C D from L2,
                      for the mean of the clamped weights
Arithmetic is float64, as in ../scale.py: reciprocals of tiny dispersions overflow float32.

B sets of clusters, C clusters, D features, P splits.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import cdiv, launch, next_power_of_2
from acmoe.ops.statistics.pending import Pending
from acmoe.ops.statistics.triton.dispersion import Partials
from acmoe.ops.statistics.triton.epilogue import ROW_STATISTICS, clamp_to_float32, cluster_epilogue
from acmoe.ops.statistics.triton.sorted_dispersion import SortedTokens, measure_sorted

# Elements (clusters x features) of one program of the normalising kernel.
NORMALISE_TILE = 2048


def reduce_to_dispersion(
    stats_input: Partials | SortedTokens,
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
    into = into or _allocate(stats_input)
    options = {"floor": 0.0, "eps": 0.0, "min_tokens": 0}
    result = "dispersion" if known is None else "copy"
    copied = _reduce(stats_input, *into, pending, known, root=root, result=result, **options)
    return *into, None if known is None else copied


def reduce_to_scale(
    stats_input: Partials | SortedTokens,
    *,
    root: bool,
    normalize: str,
    floor: float,
    eps: float,
    clamp: float | None,
    min_tokens: int,
    into: tuple[Tensor, Tensor] | None = None,
    pending: Pending | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale and dispersion (B, C, D) and count (B, C); see `reduce_to_dispersion`."""
    direct = normalize == "cluster" and clamp is None
    dispersion_BCD, count_BC = into or _allocate(stats_input)
    result = _reduce(
        stats_input,
        dispersion_BCD,
        count_BC,
        pending,
        None,
        root=root,
        result="scale" if direct else "rows",
        floor=floor,
        eps=eps,
        min_tokens=min_tokens,
    )
    if direct:
        return result, dispersion_BCD, count_BC
    B, C, D = dispersion_BCD.shape
    scale_BCD = torch.empty_like(dispersion_BCD)
    BC = next_power_of_2(C)
    BD = max(16, min(next_power_of_2(D), NORMALISE_TILE // BC))
    launch(
        _normalise_kernel, (B, cdiv(D, BD)), dispersion_BCD, result, scale_BCD, C, D, floor,
        eps, clamp or 0.0, NORMALIZE=normalize, CLAMPED=clamp is not None, BC=BC, BD=BD,
        num_warps=8,
    )  # fmt: skip
    return scale_BCD, dispersion_BCD, count_BC


def _allocate(stats_input: Partials | SortedTokens) -> tuple[Tensor, Tensor]:
    """Allocate the outputs: dispersion (B, C, D) and count (B, C)."""
    if isinstance(stats_input, SortedTokens):
        B, C, D = 1, stats_input.begin.numel() - 1, stats_input.x.shape[1]
    else:
        B, _, C, D = stats_input.spread.shape
    new = partial(stats_input[0].new_empty, dtype=torch.float32)
    return new(B, C, D), new(B, C)


def _reduce(
    stats_input: Partials | SortedTokens,
    dispersion_BCD: Tensor,
    count_BC: Tensor,
    pending: Pending | None,
    known_CD: Tensor | None,
    *,
    root: bool,
    result: str,
    floor: float,
    eps: float,
    min_tokens: int,
) -> Tensor:
    """Write dispersion and count; return what `result` names: scale, rows, dispersion, or a copy.

    pending, known_CD: as in `reduce_to_dispersion`.
    """
    B, C, D = dispersion_BCD.shape
    out = dispersion_BCD
    if result in ("scale", "copy"):
        out = torch.empty_like(dispersion_BCD)
    elif result == "rows":
        out = dispersion_BCD.new_empty(B, C, ROW_STATISTICS.value, dtype=torch.float64)
    outputs = dispersion_BCD, count_BC, out, *(pending or (None, None)), known_CD
    if isinstance(stats_input, SortedTokens):
        options = {"floor": floor, "eps": eps, "min_tokens": min_tokens}
        measure_sorted(stats_input, *outputs, root=root, result=result, **options)
        return out
    width = max(16, next_power_of_2(D))
    launch(
        _reduce_partials_kernel, (B * C,), stats_input.spread, stats_input.count, *outputs, C, D,
        stats_input.spread.shape[1], floor, eps, min_tokens, ROOT=root, RESULT=result, BD=width,
        num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return out


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
def _normalise_kernel(
    dispersion_ptr, rows_ptr, scale_ptr, C, D, floor, eps, clamp, NORMALIZE: tl.constexpr,
    CLAMPED: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Divide 1 / s by its mean over features, clusters or both (NORMALIZE); one feature block."""
    set_id = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    row_ptr = rows_ptr + (set_id * C + c) * ROW_STATISTICS
    mean = tl.load(row_ptr, mask=c < C, other=0.0)
    informative = tl.load(row_ptr + 1, mask=c < C, other=0.0)
    row_sum = tl.load(row_ptr + 2, mask=c < C, other=0.0)
    clusters = tl.maximum(tl.sum(informative), 1.0)  # if none is informative, all rows become ones
    highest = clamp * (tl.sum(row_sum) / (clusters * D))
    if CLAMPED and NORMALIZE != "feature":
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
        column = tl.sum(weight, axis=0)
        scale = weight / tl.where(column > 0, column / clusters, 1.0)[None, :]
    else:
        overall = tl.sum(row_sum)
        scale = weight / tl.where(overall > 0, overall / (clusters * D), 1.0)
    scale = tl.where(informative[:, None] > 0, clamp_to_float32(scale), 1.0)
    offs = (set_id * C + c)[:, None] * D + d[None, :]
    valid = (c[:, None] < C) & (d[None, :] < D)
    tl.store(scale_ptr + offs, scale.to(tl.float32), mask=valid)
