"""One launch for a decode step's query, key and value: rotate, scale, and store in the rings.

A program has one head of one sequence. Written as separate operations this takes about twenty
launches a layer, each of which a GPU spends more time to start than to compute.

B batch, H heads, N places of a ring, P features of a head, W features of a stored head, J = P / 2
feature pairs.
"""

import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.launcher import launch, next_power_of_2


def store(
    q_BH1P: Tensor,
    k_BH1P: Tensor,
    v_BH1P: Tensor,
    keys_BHNW: Tensor,
    values_BHNW: Tensor,
    place_1: Tensor,
    rotation_21J: Tensor | None,
    factor: float,
) -> Tensor:
    """Compute `store_in_ring` (ops/attention/ring.py)."""
    B, H, _, P = q_BH1P.shape
    N, W = keys_BHNW.shape[2:]
    out_BH1W = q_BH1P.new_empty(B, H, 1, W)
    rotation = q_BH1P if rotation_21J is None else rotation_21J.contiguous()
    new = (q_BH1P, k_BH1P, v_BH1P)
    strides = [stride for one in new for stride in one.stride()[:2]]
    if B > 0:
        launch(
            _store_kernel, (B * H,), *new, out_BH1W, keys_BHNW, values_BHNW, place_1, rotation,
            *strides, H, N, P, W, factor,
            ROTATE=rotation_21J is not None, BW=next_power_of_2(W), num_warps=1,
        )  # fmt: skip
    return out_BH1W


@triton.jit
def _load(x_ptr, rotation_ptr, p, P, ROTATE: tl.constexpr):
    """Load the (BW,) float32 features of a head, rotated; zeros from P on."""
    x = tl.load(x_ptr + p, mask=p < P, other=0.0).to(tl.float32)
    if ROTATE:
        J = P // 2
        first = p < J
        other = tl.load(x_ptr + tl.where(first, p + J, p - J), mask=p < P, other=0.0)
        pair = tl.where(first, p, p - J)
        cos = tl.load(rotation_ptr + pair, mask=p < P, other=0.0)
        sin = tl.load(rotation_ptr + J + pair, mask=p < P, other=0.0)
        x = x * cos + tl.where(first, -sin, sin) * other.to(tl.float32)
    return x


@triton.jit
def _store_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, keys_ptr, values_ptr, place_ptr, rotation_ptr, q_batch, q_head,
    k_batch, k_head, v_batch, v_head, H, N, P, W, factor, ROTATE: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H, row % H
    p = tl.arange(0, BW)
    at = (row * N + tl.load(place_ptr)) * W + p
    query = _load(q_ptr + b * q_batch + h * q_head, rotation_ptr, p, P, ROTATE) * factor
    key = _load(k_ptr + b * k_batch + h * k_head, rotation_ptr, p, P, ROTATE)
    value = _load(v_ptr + b * v_batch + h * v_head, rotation_ptr, p, P, False)
    tl.store(out_ptr + row * W + p, query.to(out_ptr.dtype.element_ty), mask=p < W)
    tl.store(keys_ptr + at, key.to(keys_ptr.dtype.element_ty), mask=p < W)
    tl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=p < W)
