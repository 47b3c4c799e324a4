"""Attention inside the windows of a map, read and written where its tokens lie.

A window of at most 64 tokens is one tile, so a program has all its scores at once: nothing is
rolled, cut out or put back, no softmax runs over several steps, and backward needs no saved
normaliser. The numbers of a token are [query, key, value], each H heads of P features.

    forward    one program a window and head
    backward   one program a head and several windows, whose scores' gradients it adds up: that of
               the bias is the sum over programs, taken afterwards in one order

Floor: 4 D numbers of every token read or written forward, 7 D backward.

B images, Y rows and X columns of the map, N tokens of a window, H heads, P features of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from acmoe.ops.device.dot import dot

PROGRAMS = 1056  # of the backward: eight for each of an H200's 132 processors


@triton.jit
def _window(
    index, Y, X, rows, columns, down, right, N: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of window `index`, counted over images: (BN,) where its tokens are, and their pieces.

    Tokens that the shift brings together from two ends of the map are of different pieces.
    """
    across = X // columns
    windows = (Y // rows) * across
    image, window = index // windows, index % windows
    n = tl.arange(0, BN)
    y = window // across * rows + n // columns + down
    x = window % across * columns + n % columns + right
    piece = (y >= Y).to(tl.int32) * 2 + (x >= X).to(tl.int32)
    place = (image * Y + y % Y).to(tl.int64) * X + x % X
    return tl.where(n < N, place, 0), piece


@triton.jit
def _share(q, k, bias_ptr, piece, scale, N: tl.constexpr, BN: tl.constexpr):
    """(BN, BN) softmax of the scores; rows past the window's end see all of it and are not used."""
    n = tl.arange(0, BN)
    inside = (n[:, None] < N) & (n[None, :] < N)
    score = dot(q, tl.trans(k), tl.zeros((BN, BN), tl.float32)) * scale
    score += tl.load(bias_ptr + n[:, None] * N + n[None, :], mask=inside, other=0.0)
    seen = (n[None, :] < N) & ((piece[:, None] == piece[None, :]) | (n[:, None] >= N))
    score = tl.where(seen, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=1)[:, None])
    return weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def _forward_kernel(
    qkv_ptr, bias_ptr, out_ptr, Y, X, rows, columns, down, right, scale,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    place, piece = _window(tl.program_id(0), Y, X, rows, columns, down, right, N, BN)
    n, p = tl.arange(0, BN), tl.arange(0, BP)
    inside = (n[:, None] < N) & (p[None, :] < P)
    at = place[:, None] * (3 * H * P) + head * P + p[None, :]
    q = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    k = tl.load(qkv_ptr + at + H * P, mask=inside, other=0.0)
    v = tl.load(qkv_ptr + at + 2 * H * P, mask=inside, other=0.0)
    share = _share(q, k, bias_ptr + head * N * N, piece, scale, N, BN)
    out = dot(share.to(v.dtype), v, tl.zeros((BN, BP), tl.float32))
    at = place[:, None] * (H * P) + head * P + p[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr, qkv_ptr, bias_ptr, dqkv_ptr, dbias_ptr,
    Y, X, rows, columns, down, right, scale, windows,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    n, p = tl.arange(0, BN), tl.arange(0, BP)
    inside = (n[:, None] < N) & (p[None, :] < P)
    dbias = tl.zeros((BN, BN), dtype=tl.float32)
    nothing = tl.zeros((BN, BP), dtype=tl.float32)
    for index in range(tl.program_id(0), windows, tl.num_programs(0)):
        place, piece = _window(index, Y, X, rows, columns, down, right, N, BN)
        at = place[:, None] * (3 * H * P) + head * P + p[None, :]
        q = tl.load(qkv_ptr + at, mask=inside, other=0.0)
        k = tl.load(qkv_ptr + at + H * P, mask=inside, other=0.0)
        v = tl.load(qkv_ptr + at + 2 * H * P, mask=inside, other=0.0)
        from_out = place[:, None] * (H * P) + head * P + p[None, :]
        grad = tl.load(grad_ptr + from_out, mask=inside, other=0.0)
        share = _share(q, k, bias_ptr + head * N * N, piece, scale, N, BN)
        dshare = dot(grad, tl.trans(v), tl.zeros((BN, BN), tl.float32))
        dscore = share * (dshare - tl.sum(share * dshare, axis=1)[:, None])
        dbias += dscore
        low = dscore.to(q.dtype)
        dq = dot(low, k, nothing) * scale
        dk = dot(tl.trans(low), q, nothing) * scale
        dv = dot(tl.trans(share.to(grad.dtype)), grad, nothing)
        tl.store(dqkv_ptr + at, dq.to(dqkv_ptr.dtype.element_ty), mask=inside)
        tl.store(dqkv_ptr + at + H * P, dk.to(dqkv_ptr.dtype.element_ty), mask=inside)
        tl.store(dqkv_ptr + at + 2 * H * P, dv.to(dqkv_ptr.dtype.element_ty), mask=inside)
    to = (tl.program_id(0) * H + head) * N * N + n[:, None] * N + n[None, :]
    tl.store(dbias_ptr + to, dbias, mask=(n[:, None] < N) & (n[None, :] < N))


def _sizes(qkv: Tensor, bias: Tensor, window: tuple[int, int]) -> tuple[int, dict[str, int]]:
    """How many windows there are, and the constants both kernels are compiled with."""
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
    B, Y, X, width = qkv.shape
    windows, constants = _sizes(qkv, bias, window)
    out = qkv.new_empty(B, Y, X, width // 3)
    _forward_kernel[(windows, constants["H"])](
        qkv, bias, out, Y, X, *window, *shift, constants["P"] ** -0.5, **constants, num_warps=4
    )
    return out


def run_backward(
    grad: Tensor, qkv: Tensor, bias: Tensor, window: tuple[int, int], shift: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv, and of the bias in float32."""
    Y, X = qkv.shape[1:3]
    windows, constants = _sizes(qkv, bias, window)
    groups = max(1, min(windows, PROGRAMS // constants["H"]))
    dqkv = torch.empty_like(qkv)
    dbias = bias.new_empty(groups, *bias.shape)
    _backward_kernel[(groups, constants["H"])](
        grad, qkv, bias, dqkv, dbias, Y, X, *window, *shift, constants["P"] ** -0.5, windows,
        **constants, num_warps=4,
    )  # fmt: skip
    return dqkv, dbias.sum(0)
