"""One cluster, from the sum of its tokens' terms to dispersion and scale: device functions.

Called by whoever adds up a cluster's last part: scale.py, sorted_dispersion.py and,
for the running average, running.py. Arithmetic is float64, as in ../scale.py: reciprocals of
tiny dispersions overflow float32.

D features.
"""

import triton
import triton.language as tl

# A sum with a poisoned term (dispersion.py) is at least this.
SPOILED = tl.constexpr(1e38)
TINY = tl.constexpr(1.1754943508222875e-38)  # least and greatest normal float32
HUGE = tl.constexpr(3.4028234663852886e38)
ROW_STATISTICS = tl.constexpr(3)  # mean dispersion, 1 if the cluster informs, sum of weights


@triton.jit
def finish_cluster(
    total, tokens, row, d, D, dispersion_ptr, count_ptr, out_ptr, floor, eps, min_tokens,
    ROOT: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """Write dispersion and count of a cluster, then its scale or what `normalise` needs of it.

    total: float64 sums of all features d. row: of the cluster in what is written.
    """
    known = d < D
    share = 1.0 / tl.maximum(tokens, 1).to(tl.float64)
    s = total * share
    if ROOT:
        s = tl.sqrt(s)
    s = tl.where(total < SPOILED, s, float("nan")).to(tl.float32)
    mean = mean_of(s, known, D)
    # One token that is not finite spoils all features of its cluster: the mean tells them.
    s = tl.where(mean == mean, s, float("nan"))
    tl.store(dispersion_ptr + row * D + d, s, mask=known)
    tl.store(count_ptr + row, tokens.to(tl.float32))

    if RESULT != "dispersion":
        weight, weight_sum, informs = reciprocals(s, mean, tokens, known, floor, eps, min_tokens)
        if RESULT == "scale":
            scale = mean_one(weight, weight_sum, informs, D)
            tl.store(out_ptr + row * D + d, scale.to(tl.float32), mask=known)
        else:
            tl.store(out_ptr + row * ROW_STATISTICS, mean)
            tl.store(out_ptr + row * ROW_STATISTICS + 1, informs.to(tl.float64))
            tl.store(out_ptr + row * ROW_STATISTICS + 2, weight_sum)


@triton.jit
def mean_of(s, known, D):
    """NaN if one of them is."""
    return tl.sum(tl.where(known, s.to(tl.float64), 0.0)) / D


@triton.jit
def reciprocals(s, mean, tokens, known, floor, eps, min_tokens):
    """1 / s of one cluster, floored, and their sum; whether the cluster informs."""
    s = tl.where(known, s.to(tl.float64), 0.0)
    informs = (tokens >= min_tokens) & (mean < SPOILED) & ((eps > 0) | (mean > 0))
    weight = 1.0 / tl.where(informs, tl.maximum(s, floor * mean) + eps, 1.0)
    weight_sum = tl.where(informs, tl.sum(tl.where(known, weight, 0.0)), 0.0)
    return weight, weight_sum, informs


@triton.jit
def mean_one(weight, weight_sum, informs, D):
    """Weights of one cluster over their mean; ones if it does not inform."""
    return tl.where(informs, bounded(weight / tl.where(informs, weight_sum / D, 1.0)), 1.0)


@triton.jit
def bounded(scale):
    """Within the normal numbers of float32."""
    return tl.minimum(tl.maximum(scale, TINY), HUGE)
