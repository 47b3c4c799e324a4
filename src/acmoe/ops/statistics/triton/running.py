"""Update the running average of dispersions with a batch, and its scale, in one launch.

    total   = momentum * weight + count                    (C,)
    average = average + count / total * (last - average)   (C, D)
    scale   = epilogue.py's scale of the new average       (C, D), optional

One program per cluster. The scale is computed here where each cluster is normalised by itself
(normalize="cluster" without clamp, as in scale.py). ops/statistics/running.py and
ops/statistics/scale.py hold the specification. Memory traffic: 2 C D float32 read, C D written, and
C D more with a scale.

C clusters, D features.
"""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.statistics.triton.epilogue import mean_of, mean_one, reciprocals


def update_running(
    average_CD: Tensor,
    weight_C: Tensor,
    last_CD: Tensor,
    count_C: Tensor,
    scale_CD: Tensor | None,
    *,
    momentum: float,
    floor: float,
    eps: float,
    min_tokens: int,
) -> None:
    """Update average and weight in place, zero the count, and overwrite the scale if there is one.

    All tensors are contiguous float32. A cluster with fewer than two tokens in the batch, or with a
    non-finite dispersion, keeps its average and weight.
    """
    C, D = average_CD.shape
    width = max(16, triton.next_power_of_2(D))
    _update_running_kernel[(C,)](
        average_CD, weight_C, last_CD, count_C, average_CD if scale_CD is None else scale_CD,
        D, momentum, floor, eps, min_tokens,
        SCALED=scale_CD is not None, BD=width, num_warps=8 if width > 2048 else 4,
    )  # fmt: skip


@triton.jit
def _update_running_kernel(
    average_ptr, weight_ptr, last_ptr, count_ptr, scale_ptr, D, momentum, floor, eps, min_tokens,
    SCALED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    valid = d < D
    average = tl.load(average_ptr + c * D + d, mask=valid, other=0.0)
    last = tl.load(last_ptr + c * D + d, mask=valid, other=0.0)
    weight = tl.load(weight_ptr + c)
    count = tl.load(count_ptr + c)
    tl.debug_barrier()  # every warp has read count and weight before they are written below
    total = momentum * weight + count
    share = count / tl.where(count >= 2, total, 1.0)  # the divisor is total >= 2, or 1
    not_finite = tl.max(tl.where(tl.abs(last) < float("inf"), 0, 1))
    accept = (count >= 2) & (share > 0) & (not_finite == 0)
    mixed = tl.where(share == 1, last, average + share * (last - average))
    average = tl.where(accept, mixed, average)
    weight = tl.where(accept, total, weight)
    tl.store(average_ptr + c * D + d, average, mask=valid)
    tl.store(weight_ptr + c, weight)
    tl.store(count_ptr + c, 0.0)
    if SCALED:
        mean = mean_of(average, valid, D)
        inverse, inverse_sum, informative = reciprocals(
            average, mean, weight, valid, floor, eps, min_tokens
        )
        scale = mean_one(inverse, inverse_sum, informative, D)
        tl.store(scale_ptr + c * D + d, scale.to(tl.float32), mask=valid)
