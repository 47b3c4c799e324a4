"""Loss and gradient of a block of logits, in place: the part between two matrix products.

A row of logits is read once for its normaliser and once more to be replaced by
    share * (softmax(logits) - one at the target),
in the dtype the next product multiplies. With float32 logits and a 16-bit product the gradient
takes the first half of each row's bytes, so no second (N, V) buffer exists.

Floor: N V (4 + 4 + 2) bytes for float32 logits and a bf16 gradient. Both reads come from memory: a
row of 267,735 float32 words is 1 MB, and 132 of them outgrow the L2.

N tokens of one chunk, V words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS, WARPS = 4096, 8  # of one step along a row
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that its difference to -inf is not NaN


def gradient_view(logits_NV: Tensor, dtype: torch.dtype) -> Tensor:
    """The (N, V) gradient that `softmax_gradient_` leaves in the logits' memory."""
    return logits_NV.view(dtype)[:, : logits_NV.shape[1]]


@torch.library.custom_op("acmoe::softmax_gradient_", mutates_args=("logits",))
def softmax_gradient_(
    logits: Tensor, targets: Tensor, share: Tensor, gradient_dtype: torch.dtype
) -> Tensor:
    """Cross-entropy (N,) in nats, float32; logits become share * their gradient.

    logits   (N, V), each row contiguous; rows that begin at a multiple of 16 bytes are faster
    share    (N,) float32 weight of each token's loss in the total; 0 leaves a row of zeros
    Read the result through `gradient_view(logits, gradient_dtype)`.
    """
    N, V = logits.shape
    loss_N = share.new_empty(N, dtype=torch.float32)
    if N > 0:
        block = min(WORDS, max(128, triton.next_power_of_2(V)))
        gradient = gradient_view(logits, gradient_dtype)
        _gradient_kernel[(N,)](
            logits, gradient, targets.contiguous(), share.contiguous(), loss_N, V,
            logits.stride(0), gradient.stride(0), BV=block, num_warps=min(WARPS, block // 128),
        )  # fmt: skip
    return loss_N


@softmax_gradient_.register_fake
def _(logits: Tensor, targets: Tensor, share: Tensor, gradient_dtype: torch.dtype) -> Tensor:
    return share.new_empty(logits.shape[0], dtype=torch.float32)


@triton.jit
def _log_normaliser(row_ptr, V, BV: tl.constexpr):
    """log of the sum of exponentials of a row; every lane keeps a maximum and a sum of its own."""
    v = tl.arange(0, BV)
    highest = tl.full((BV,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BV,), dtype=tl.float32)
    for start in range(0, V, BV):
        value = tl.load(row_ptr + start + v, mask=start + v < V, other=float("-inf"))
        value = value.to(tl.float32)
        higher = tl.maximum(highest, value)
        total = total * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
    top = tl.max(highest, axis=0)
    return top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))


@triton.jit
def _gradient_kernel(
    logits_ptr, gradient_ptr, targets_ptr, share_ptr, loss_ptr, V, stride, gradient_stride,
    BV: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + n * stride
    out_ptr = gradient_ptr + n * gradient_stride
    target = tl.load(targets_ptr + n)
    share = tl.load(share_ptr + n).to(tl.float32)
    chosen = tl.load(row_ptr + target).to(tl.float32)
    norm = _log_normaliser(row_ptr, V, BV)
    tl.store(loss_ptr + n, norm - chosen)
    v = tl.arange(0, BV)
    for start in range(0, V, BV):
        word = start + v
        value = tl.load(row_ptr + word, mask=word < V, other=float("-inf")).to(tl.float32)
        slope = tl.exp(value - norm) - (word == target).to(tl.float32)
        slope = tl.where(share != 0, share * slope, 0.0)
        # A narrower gradient lands on logits that other threads may still be about to read.
        tl.debug_barrier()
        tl.store(out_ptr + word, slope.to(gradient_ptr.dtype.element_ty), mask=word < V)
