"""A batch folded into a running average, and the average's scale, in one launch.

One program a cluster: what the batch saw moves into its average, weighted by tokens, and where the
weights of a cluster average one by themselves (as scale.py has it) the scale follows at
once. The forms in ops/statistics/running.py and ops/statistics/scale.py are the specification.

    fold        floor: 2 C D read, C D written, and C D more with a scale (float32)

C clusters, D features.
"""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.statistics.triton.epilogue import mean_of, mean_one, reciprocals


def fold(
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
    """Change average and weight, set the count to 0 and overwrite the scale, if there is one.

    All contiguous float32.
    """
    C, D = average_CD.shape
    width = max(16, triton.next_power_of_2(D))
    _fold_kernel[(C,)](
        average_CD, weight_C, last_CD, count_C, average_CD if scale_CD is None else scale_CD,
        D, momentum, floor, eps, min_tokens,
        SCALED=scale_CD is not None, BD=width, num_warps=8 if width > 2048 else 4,
    )  # fmt: skip


@triton.jit
def _fold_kernel(
    average_ptr, weight_ptr, last_ptr, count_ptr, scale_ptr, D, momentum, floor, eps, min_tokens,
    SCALED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    known = d < D
    average = tl.load(average_ptr + c * D + d, mask=known, other=0.0)
    last = tl.load(last_ptr + c * D + d, mask=known, other=0.0)
    weight = tl.load(weight_ptr + c)
    count = tl.load(count_ptr + c)
    tl.debug_barrier()  # count and weight are written below: every warp has read them by now
    total = momentum * weight + count
    share = count / tl.where(count >= 2, total, 1.0)  # total >= 2 where it divides
    not_finite = tl.max(tl.where(tl.abs(last) < float("inf"), 0, 1))
    sound = (count >= 2) & (share > 0) & (not_finite == 0)
    average = tl.where(sound, average + share * (last - average), average)
    weight = tl.where(sound, total, weight)
    tl.store(average_ptr + c * D + d, average, mask=known)
    tl.store(weight_ptr + c, weight)
    tl.store(count_ptr + c, 0.0)
    if SCALED:
        mean = mean_of(average, known, D)
        inverse, inverse_sum, informs = reciprocals(
            average, mean, weight, known, floor, eps, min_tokens
        )
        scale = mean_one(inverse, inverse_sum, informs, D)
        tl.store(scale_ptr + c * D + d, scale.to(tl.float32), mask=known)
