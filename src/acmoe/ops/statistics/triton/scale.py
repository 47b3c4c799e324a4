"""From partial sums to dispersion and scale: the Triton form of ops/statistics/scale.py.

One program a cluster adds up its parts, the splits of all tokens (dispersion.py); sorted
tokens do so on their own (sorted_dispersion.py). Where the weights of a cluster average one
by themselves (normalize="cluster" without clamp, the default) it writes the scale at once; the
other normalisations compare clusters and take a launch more.

    finish      floor: P C D partials read, 2 C D written (float32)
    normalise   floor: C D read, C D written; every program also reads all C D from L2 if a clamp
                needs the mean of what it left
Arithmetic is float64, as in ../scale.py: reciprocals of tiny dispersions overflow float32.

B sets of clusters, C clusters, D features, P splits.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.statistics.triton.dispersion import Partials
from acmoe.ops.statistics.triton.epilogue import ROW_STATISTICS, bounded, finish_cluster
from acmoe.ops.statistics.triton.sorted_dispersion import SortedTokens, measure_sorted

# Features of a `normalise` program, per cluster of its block: tiles of 2048 numbers.
NORMALISE_TILE = 2048


def finish_dispersion(
    source: Partials | SortedTokens, *, root: bool, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Dispersion (B, C, D) and count (B, C), float32.

    root: of a variance its square root. into: contiguous tensors to write both into.
    """
    into = into or _places(source)
    _finish(source, *into, root=root, result="dispersion", floor=0.0, eps=0.0, min_tokens=0)
    return into


def finish_scale(
    source: Partials | SortedTokens,
    *,
    root: bool,
    normalize: str,
    floor: float,
    eps: float,
    clamp: float | None,
    min_tokens: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and dispersion (B, C, D), count (B, C); the latter two as `finish_dispersion`."""
    direct = normalize == "cluster" and clamp is None
    dispersion_BCD, count_BC = into or _places(source)
    result = _finish(
        source,
        dispersion_BCD,
        count_BC,
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
    BC = triton.next_power_of_2(C)
    BD = max(16, min(triton.next_power_of_2(D), NORMALISE_TILE // BC))
    _normalise_kernel[(B, triton.cdiv(D, BD))](
        dispersion_BCD, result, scale_BCD, C, D, floor, eps, clamp or 0.0,
        NORMALIZE=normalize, CLAMPED=clamp is not None, BC=BC, BD=BD, num_warps=8,
    )  # fmt: skip
    return scale_BCD, dispersion_BCD, count_BC


def _places(source: Partials | SortedTokens) -> tuple[Tensor, Tensor]:
    """Where dispersion (B, C, D) and count (B, C) go."""
    if isinstance(source, SortedTokens):
        B, C, D = 1, source.begin.numel() - 1, source.x.shape[1]
    else:
        B, _, C, D = source.spread.shape
    new = partial(source[0].new_empty, dtype=torch.float32)
    return new(B, C, D), new(B, C)


def _finish(
    source: Partials | SortedTokens,
    dispersion_BCD: Tensor,
    count_BC: Tensor,
    *,
    root: bool,
    result: str,
    floor: float,
    eps: float,
    min_tokens: int,
) -> Tensor:
    """Write dispersion and count; what `result` names (scale, rows of statistics, or neither)."""
    B, C, D = dispersion_BCD.shape
    out = dispersion_BCD
    if result == "scale":
        out = torch.empty_like(dispersion_BCD)
    elif result == "rows":
        out = dispersion_BCD.new_empty(B, C, ROW_STATISTICS.value, dtype=torch.float64)
    places = dispersion_BCD, count_BC, out
    if isinstance(source, SortedTokens):
        options = {"floor": floor, "eps": eps, "min_tokens": min_tokens}
        measure_sorted(source, *places, root=root, result=result, **options)
        return out
    width = max(16, triton.next_power_of_2(D))
    _finish_kernel[(B * C,)](
        source.spread, source.count, *places, C, D, source.spread.shape[1], floor, eps,
        min_tokens, ROOT=root, RESULT=result, BD=width, num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _finish_kernel(
    spread_ptr, count_ptr, dispersion_ptr, tokens_ptr, out_ptr, C, D, P, floor, eps, min_tokens,
    ROOT: tl.constexpr, RESULT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One cluster of one set: what the splits of its tokens sum to."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    total = tl.zeros((BD,), dtype=tl.float64)
    tokens = 0
    for p in tl.range(0, P, loop_unroll_factor=4):  # 4 loads under way instead of one
        at = ((row // C) * P + p) * C + row % C
        total += tl.load(spread_ptr + at * D + d, mask=d < D, other=0.0).to(tl.float64)
        tokens += tl.load(count_ptr + at)
    finish_cluster(
        total, tokens, row, d, D, dispersion_ptr, tokens_ptr, out_ptr, floor, eps, min_tokens,
        ROOT, RESULT,
    )  # fmt: skip


@triton.jit
def _weights(
    dispersion_ptr, set_of, c, d, C, D, mean, informs, floor, eps, highest, CLAMPED: tl.constexpr
):  # fmt: skip
    """1 / s of a block of clusters and features, clamped; 0 where a cluster does not inform."""
    known = (c[:, None] < C) & (d[None, :] < D) & (informs[:, None] > 0)
    at = (set_of * C + c)[:, None] * D + d[None, :]
    s = tl.load(dispersion_ptr + at, mask=known, other=1.0).to(tl.float64)
    weight = 1.0 / tl.where(known, tl.maximum(s, floor * mean[:, None]) + eps, 1.0)
    if CLAMPED:
        weight = tl.minimum(weight, highest)
    return tl.where(known, weight, 0.0)


@triton.jit
def _normalise_kernel(
    dispersion_ptr, rows_ptr, scale_ptr, C, D, floor, eps, clamp, NORMALIZE: tl.constexpr,
    CLAMPED: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A block of features of every cluster: 1 / s over the mean that NORMALIZE names."""
    set_of = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    row_ptr = rows_ptr + (set_of * C + c) * ROW_STATISTICS
    mean = tl.load(row_ptr, mask=c < C, other=0.0)
    informs = tl.load(row_ptr + 1, mask=c < C, other=0.0)
    row_sum = tl.load(row_ptr + 2, mask=c < C, other=0.0)
    clusters = tl.maximum(tl.sum(informs), 1.0)  # if none informs all rows become ones anyway
    highest = clamp * (tl.sum(row_sum) / (clusters * D))
    if CLAMPED and NORMALIZE != "feature":
        row_sum = tl.zeros((BC,), dtype=tl.float64)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            weight = _weights(
                dispersion_ptr, set_of, c, d, C, D, mean, informs, floor, eps, highest, CLAMPED
            )
            row_sum += tl.sum(weight, axis=1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    weight = _weights(
        dispersion_ptr, set_of, c, d, C, D, mean, informs, floor, eps, highest, CLAMPED
    )
    if NORMALIZE == "cluster":
        scale = weight / tl.where(informs > 0, row_sum / D, 1.0)[:, None]
    elif NORMALIZE == "feature":
        column = tl.sum(weight, axis=0)
        scale = weight / tl.where(column > 0, column / clusters, 1.0)[None, :]
    else:
        overall = tl.sum(row_sum)
        scale = weight / tl.where(overall > 0, overall / (clusters * D), 1.0)
    scale = tl.where(informs[:, None] > 0, bounded(scale), 1.0)
    at = (set_of * C + c)[:, None] * D + d[None, :]
    known = (c[:, None] < C) & (d[None, :] < D)
    tl.store(scale_ptr + at, scale.to(tl.float32), mask=known)
