"""Cross-entropy loss (N,) and gradient of a chunk of logits (N, V), computed in place.

One program per row. It reads the row once for log-sum-exp, then a second time to overwrite it with
    share_n * (softmax(logits)_nv - [v == target_n])
in the dtype of the GEMM that follows. With float32 logits and a 16-bit GEMM the gradient takes the
first half of each row's bytes, so no second (N, V) buffer exists.

Memory traffic: N V (4 + 4 + 2) bytes for float32 logits and a bf16 gradient. Both reads come from
memory: a row of 267,735 float32 logits is 1 MB, and 132 of them exceed the L2.

N tokens of one chunk, V words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # elements per step along a row, and warps per program
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf minus it is not NaN


def gradient_view(logits_NV: Tensor, dtype: torch.dtype) -> Tensor:
    """View the (N, V) gradient that `softmax_gradient_` leaves in the logits' memory."""
    return logits_NV.view(dtype)[:, : logits_NV.shape[1]]


@torch.library.custom_op("acmoe::softmax_gradient_", mutates_args=("logits",))
def softmax_gradient_(
    logits: Tensor, targets: Tensor, share: Tensor, gradient_dtype: torch.dtype
) -> Tensor:
    """Return the cross-entropy (N,) in nats, float32; overwrite logits with share * their gradient.

    logits   (N, V), each row contiguous; rows that begin at a multiple of 16 bytes are faster
    share    (N,) float32 weight of each token's loss in the total; 0 leaves a row of zeros
    Read the gradient through `gradient_view(logits, gradient_dtype)`.
    """
    N, V = logits.shape
    loss_N = share.new_empty(N, dtype=torch.float32)
    if N > 0:
        block = min(BLOCK, max(128, triton.next_power_of_2(V)))
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
def _log_sum_exp(row_ptr, V, BV: tl.constexpr):
    """Return the log-sum-exp of a row; each lane keeps its own running maximum and sum."""
    v = tl.arange(0, BV)
    running_max = tl.full((BV,), LOWEST, dtype=tl.float32)
    running_sum = tl.zeros((BV,), dtype=tl.float32)
    for start in range(0, V, BV):
        value = tl.load(row_ptr + start + v, mask=start + v < V, other=float("-inf"))
        value = value.to(tl.float32)
        new_max = tl.maximum(running_max, value)
        running_sum = running_sum * tl.exp(running_max - new_max) + tl.exp(value - new_max)
        running_max = new_max
    row_max = tl.max(running_max, axis=0)
    return row_max + tl.log(tl.sum(running_sum * tl.exp(running_max - row_max), axis=0))


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
    target_logit = tl.load(row_ptr + target).to(tl.float32)
    log_sum_exp = _log_sum_exp(row_ptr, V, BV)
    tl.store(loss_ptr + n, log_sum_exp - target_logit)
    v = tl.arange(0, BV)
    for start in range(0, V, BV):
        word = start + v
        value = tl.load(row_ptr + word, mask=word < V, other=float("-inf")).to(tl.float32)
        grad = tl.exp(value - log_sum_exp) - (word == target).to(tl.float32)
        grad = tl.where(share != 0, share * grad, 0.0)
        # A narrower gradient overwrites logits that other threads may not have read yet.
        tl.debug_barrier()
        tl.store(out_ptr + word, grad.to(gradient_ptr.dtype.element_ty), mask=word < V)
