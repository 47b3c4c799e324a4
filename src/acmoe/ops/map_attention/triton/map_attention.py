"""Attention inside the windows of a feature map (Swin's shifted windows), without copies.

For every head and every window of N tokens:

    out = softmax(scale * q @ k^T + bias) @ v,  q, k, v (N, P), bias (N, N), scale = P ** -0.5

The kernels read and write tokens at their positions in the (Y, X) map, so nothing is rolled, cut
into windows or put together again. A window of at most 64 tokens is one tile: a program holds all
its scores at once, the softmax needs no loop over keys, and backward recomputes the probabilities
without a saved logsumexp. A token's features are [query, key, value], each H heads of P features.

    forward    one program per window and head
    backward   one program per head and several windows; it sums their dscore, and dbias is the sum
               of these partial results over the programs, taken afterwards in a fixed order

Memory traffic, with D = H * P: at least 4 D elements per token in forward and 7 D in backward.

Shapes: B images, Y rows and X columns of the map, N tokens per window, H heads, P head dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import dot

PROGRAMS = 1056  # programs of the backward: eight for each of the 132 SMs of an H200


@triton.jit
def _window(
    index, Y, X, rows, columns, down, right, N: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return (BN,) positions of the tokens of window `index`, and their regions.

    Windows are numbered across all images. The cyclic shift by (down, right) can bring tokens from
    opposite borders of the map into one window; they get different regions, and do not attend to
    each other.
    """
    across = X // columns
    windows = (Y // rows) * across
    image, window = index // windows, index % windows
    n = tl.arange(0, BN)
    y = window // across * rows + n // columns + down
    x = window % across * columns + n % columns + right
    region = (y >= Y).to(tl.int32) * 2 + (x >= X).to(tl.int32)
    position = (image * Y + y % Y).to(tl.int64) * X + x % X
    return tl.where(n < N, position, 0), region


@triton.jit
def _probabilities(q, k, bias_ptr, region, scale, N: tl.constexpr, BN: tl.constexpr):
    """Return (BN, BN) softmax(scale * q @ k^T + bias) over the keys of the query's region.

    Padding rows n >= N attend to the whole window, which avoids NaN; their values are not used.
    """
    n = tl.arange(0, BN)
    in_bounds = (n[:, None] < N) & (n[None, :] < N)
    score = dot(q, tl.trans(k), tl.zeros((BN, BN), tl.float32)) * scale
    score += tl.load(bias_ptr + n[:, None] * N + n[None, :], mask=in_bounds, other=0.0)
    visible = (n[None, :] < N) & ((region[:, None] == region[None, :]) | (n[:, None] >= N))
    score = tl.where(visible, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=1)[:, None])
    return weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def _forward_kernel(
    qkv_ptr, bias_ptr, out_ptr, Y, X, rows, columns, down, right, scale,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Compute the output of one window and head."""
    head = tl.program_id(1)
    position, region = _window(tl.program_id(0), Y, X, rows, columns, down, right, N, BN)
    n, p = tl.arange(0, BN), tl.arange(0, BP)
    in_bounds = (n[:, None] < N) & (p[None, :] < P)
    offsets = position[:, None] * (3 * H * P) + head * P + p[None, :]
    q = tl.load(qkv_ptr + offsets, mask=in_bounds, other=0.0)
    k = tl.load(qkv_ptr + offsets + H * P, mask=in_bounds, other=0.0)
    v = tl.load(qkv_ptr + offsets + 2 * H * P, mask=in_bounds, other=0.0)
    prob = _probabilities(q, k, bias_ptr + head * N * N, region, scale, N, BN)
    out = dot(prob.to(v.dtype), v, tl.zeros((BN, BP), tl.float32))
    offsets = position[:, None] * (H * P) + head * P + p[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit
def _backward_kernel(
    grad_out_ptr, qkv_ptr, bias_ptr, dqkv_ptr, dbias_ptr,
    Y, X, rows, columns, down, right, scale, windows,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dv of every num_programs-th window of a head, and their partial dbias.

    dscore = prob * (dprob - rowsum(prob * dprob)) with dprob = grad_out @ v^T.
    """
    head = tl.program_id(1)
    n, p = tl.arange(0, BN), tl.arange(0, BP)
    in_bounds = (n[:, None] < N) & (p[None, :] < P)
    dbias = tl.zeros((BN, BN), dtype=tl.float32)
    zeros = tl.zeros((BN, BP), dtype=tl.float32)
    for index in range(tl.program_id(0), windows, tl.num_programs(0)):
        position, region = _window(index, Y, X, rows, columns, down, right, N, BN)
        offsets = position[:, None] * (3 * H * P) + head * P + p[None, :]
        q = tl.load(qkv_ptr + offsets, mask=in_bounds, other=0.0)
        k = tl.load(qkv_ptr + offsets + H * P, mask=in_bounds, other=0.0)
        v = tl.load(qkv_ptr + offsets + 2 * H * P, mask=in_bounds, other=0.0)
        out_offsets = position[:, None] * (H * P) + head * P + p[None, :]
        grad_out = tl.load(grad_out_ptr + out_offsets, mask=in_bounds, other=0.0)
        prob = _probabilities(q, k, bias_ptr + head * N * N, region, scale, N, BN)
        dprob = dot(grad_out, tl.trans(v), tl.zeros((BN, BN), tl.float32))
        dscore = prob * (dprob - tl.sum(prob * dprob, axis=1)[:, None])
        dbias += dscore
        dscore_low = dscore.to(q.dtype)
        dq = dot(dscore_low, k, zeros) * scale
        dk = dot(tl.trans(dscore_low), q, zeros) * scale
        dv = dot(tl.trans(prob.to(grad_out.dtype)), grad_out, zeros)
        tl.store(dqkv_ptr + offsets, dq.to(dqkv_ptr.dtype.element_ty), mask=in_bounds)
        tl.store(dqkv_ptr + offsets + H * P, dk.to(dqkv_ptr.dtype.element_ty), mask=in_bounds)
        tl.store(dqkv_ptr + offsets + 2 * H * P, dv.to(dqkv_ptr.dtype.element_ty), mask=in_bounds)
    bias_offsets = (tl.program_id(0) * H + head) * N * N + n[:, None] * N + n[None, :]
    tl.store(dbias_ptr + bias_offsets, dbias, mask=(n[:, None] < N) & (n[None, :] < N))


def _sizes(qkv: Tensor, bias: Tensor, window: tuple[int, int]) -> tuple[int, dict[str, int]]:
    """Return the number of windows, and the constants that both kernels are compiled with."""
    B, Y, X, width = qkv.shape
    heads, tokens = bias.shape[:2]
    features = width // 3 // heads
    constants = {
        **{"H": heads, "P": features, "N": tokens},
        "BN": max(16, triton.next_power_of_2(tokens)),
        "BP": max(16, triton.next_power_of_2(features)),
    }
    return B * (Y // window[0]) * (X // window[1]), constants


def run_forward(
    qkv: Tensor, bias: Tensor, window: tuple[int, int], shift: tuple[int, int]
) -> Tensor:
    """Return the (B, Y, X, D) output for qkv (B, Y, X, 3D) and bias (H, N, N).

    window is (rows, columns), and shift is the cyclic shift (down, right) of the windows.
    """
    B, Y, X, width = qkv.shape
    windows, constants = _sizes(qkv, bias, window)
    out = qkv.new_empty(B, Y, X, width // 3)
    _forward_kernel[(windows, constants["H"])](
        qkv, bias, out, Y, X, *window, *shift, constants["P"] ** -0.5, **constants, num_warps=4
    )
    return out


def run_backward(
    grad_out: Tensor, qkv: Tensor, bias: Tensor, window: tuple[int, int], shift: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the gradient of qkv, and the gradient of the bias in float32."""
    Y, X = qkv.shape[1:3]
    windows, constants = _sizes(qkv, bias, window)
    programs = max(1, min(windows, PROGRAMS // constants["H"]))
    dqkv = torch.empty_like(qkv)
    dbias = bias.new_empty(programs, *bias.shape)
    _backward_kernel[(programs, constants["H"])](
        grad_out, qkv, bias, dqkv, dbias, Y, X, *window, *shift, constants["P"] ** -0.5, windows,
        **constants, num_warps=4,
    )  # fmt: skip
    return dqkv, dbias.sum(0)
