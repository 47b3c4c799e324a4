"""From partial sums to dispersion and scale: the Triton form of ops/scale.py.

One program a cluster adds up its parts, splits of all tokens (kernels/dispersion.py) or chunks of
its own (kernels/sorted_dispersion.py). Where the weights of a cluster average one by themselves
(normalize="cluster" without clamp, the default) it writes the scale at once; the other
normalisations compare clusters and take a second launch.

    finish      floor: P C D partials read, 2 C D written (float32)
    normalise   floor: C D read, C D written; every program also reads all C D from L2 if a clamp
                needs the mean of what it left
Arithmetic is float64, as in ops/scale.py: reciprocals of tiny dispersions overflow float32.

B sets of clusters, C clusters, D features, P splits, Q chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.kernels.dispersion import Partials
from acmoe.kernels.sorted_dispersion import Chunks, chunks_before

# A sum with a poisoned term (kernels/dispersion.py) is at least this.
SPOILED = tl.constexpr(1e38)
TINY = tl.constexpr(1.1754943508222875e-38)  # least and greatest normal float32
HUGE = tl.constexpr(3.4028234663852886e38)
ROW_STATISTICS = tl.constexpr(3)  # mean dispersion, 1 if the cluster informs, sum of weights

# Features of a `normalise` program, per cluster of its block: tiles of 2048 numbers.
NORMALISE_TILE = 2048


def finish_dispersion(
    partials: Partials | Chunks, *, root: bool, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Dispersion (B, C, D) and count (B, C), float32.

    root: of a variance its square root. into: contiguous tensors to write both into.
    """
    into = into or _places(partials)
    _finish(partials, *into, root=root, result="dispersion", floor=0.0, eps=0.0, min_tokens=0)
    return into


def finish_scale(
    partials: Partials | Chunks,
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
    dispersion_BCD, count_BC = into or _places(partials)
    result = _finish(
        partials,
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


def _places(partials: Partials | Chunks) -> tuple[Tensor, Tensor]:
    """Where dispersion (B, C, D) and count (B, C) go."""
    if isinstance(partials, Chunks):
        B, C, D = 1, partials.begin.numel() - 1, partials.spread.shape[1]
    else:
        B, _, C, D = partials.spread.shape
    return partials.spread.new_empty(B, C, D), partials.spread.new_empty(B, C)


def _finish(
    partials: Partials | Chunks,
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
    if isinstance(partials, Chunks):
        P, rows = 0, partials.rows
        parts = partials.spread, partials.begin, partials.end
    else:
        P, rows = partials.spread.shape[1], 0
        parts = partials.spread, partials.count, partials.count
    B, C, D = dispersion_BCD.shape
    out = dispersion_BCD
    if result == "scale":
        out = torch.empty_like(dispersion_BCD)
    elif result == "rows":
        out = dispersion_BCD.new_empty(B, C, ROW_STATISTICS.value, dtype=torch.float64)
    width = max(16, triton.next_power_of_2(D))
    _finish_kernel[(B * C,)](
        *parts, dispersion_BCD, count_BC, out, C, D, P, floor, eps, min_tokens, ROWS=rows,
        BC=max(16, triton.next_power_of_2(C)), ROOT=root, RESULT=result, BD=width,
        num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _finish_kernel(
    spread_ptr, count_ptr, end_ptr, dispersion_ptr, tokens_ptr, out_ptr, C, D, P, floor, eps,
    min_tokens, ROWS: tl.constexpr, BC: tl.constexpr, ROOT: tl.constexpr, RESULT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """One cluster: its dispersion, then its scale or what `normalise` needs of it.

    ROWS of a chunk: count_ptr is where clusters begin; 0: there are splits, and it counts tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    known = d < D
    total = tl.zeros((BD,), dtype=tl.float64)
    tokens = 0
    if ROWS > 0:
        first = chunks_before(count_ptr, end_ptr, row, C, ROWS, BC)
        tokens += tl.load(end_ptr + row) - tl.load(count_ptr + row)
        for q in tl.range(first, first + (tokens + ROWS - 1) // ROWS, loop_unroll_factor=4):
            total += tl.load(spread_ptr + q * D + d, mask=known, other=0.0).to(tl.float64)
    else:
        for p in tl.range(0, P, loop_unroll_factor=4):  # 4 loads under way instead of one
            at = ((row // C) * P + p) * C + row % C
            total += tl.load(spread_ptr + at * D + d, mask=known, other=0.0).to(tl.float64)
            tokens += tl.load(count_ptr + at)
    share = 1.0 / tl.maximum(tokens, 1).to(tl.float64)
    s = total * share
    if ROOT:
        s = tl.sqrt(s)
    # One token that is not finite spoils all features of its cluster.
    s = tl.where(tl.max(total) < SPOILED, s, float("nan")).to(tl.float32)
    tl.store(dispersion_ptr + row * D + d, s, mask=known)
    tl.store(tokens_ptr + row, tokens.to(tl.float32))

    if RESULT != "dispersion":
        weight, weight_sum, mean, informs = reciprocals(s, tokens, known, D, floor, eps, min_tokens)
        if RESULT == "scale":
            scale = mean_one(weight, weight_sum, informs, D)
            tl.store(out_ptr + row * D + d, scale.to(tl.float32), mask=known)
        else:
            tl.store(out_ptr + row * ROW_STATISTICS, mean)
            tl.store(out_ptr + row * ROW_STATISTICS + 1, informs.to(tl.float64))
            tl.store(out_ptr + row * ROW_STATISTICS + 2, weight_sum)


@triton.jit
def reciprocals(s, tokens, known, D, floor, eps, min_tokens):
    """1 / s of one cluster, floored, and their sum; the mean s; whether the cluster informs."""
    s = tl.where(known, s.to(tl.float64), 0.0)
    mean = tl.sum(s) / D
    informs = (tokens >= min_tokens) & (mean < SPOILED) & ((eps > 0) | (mean > 0))
    weight = 1.0 / tl.where(informs, tl.maximum(s, floor * mean) + eps, 1.0)
    weight_sum = tl.where(informs, tl.sum(tl.where(known, weight, 0.0)), 0.0)
    return weight, weight_sum, mean, informs


@triton.jit
def mean_one(weight, weight_sum, informs, D):
    """Weights of one cluster over their mean; ones if it does not inform."""
    return tl.where(informs, _bounded(weight / tl.where(informs, weight_sum / D, 1.0)), 1.0)


@triton.jit
def _bounded(scale):
    """Within the normal numbers of float32."""
    return tl.minimum(tl.maximum(scale, TINY), HUGE)


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
    scale = tl.where(informs[:, None] > 0, _bounded(scale), 1.0)
    at = (set_of * C + c)[:, None] * D + d[None, :]
    known = (c[:, None] < C) & (d[None, :] < D)
    tl.store(scale_ptr + at, scale.to(tl.float32), mask=known)
