"""Weights that the forward for Hopper saves: emulated on a CPU, and on the card if there is one.

Shapes: B streams, H heads, X = B * H, L queries, S keys before them, N = S + L, W span, P features
of a head; C columns of a row, M rows of eight queries of a head, R = X * M.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from acmoe.ops.attention.inputs import Inputs
from slow_cases import mostly_slow

B, H, MARGIN = 2, 2, 512
# Memory as long as a window, shorter, none, longer; queries that fill no tile of 128.
SHAPES = [
    pytest.param(109, 152, 109, 64, 44, True, torch.bfloat16, marks=pytest.mark.slow),
    (40, 104, 90, 64, 50, True, torch.float16),
    (0, 136, 128, 32, 32, False, torch.bfloat16),
    (200, 24, 120, 16, 9, False, torch.float16),
]


class Case(NamedTuple):
    """One call: what the kernel is given, and in float64 what it should come to."""

    S: int
    L: int
    W: int
    arguments: tuple[Any, ...]  # but for dropout, features and what is kept
    features: int
    score: Tensor  # (B, H, L, N), -inf where a query does not see a key
    window: Tensor  # (L, N)


def packed_signed_dropout(
    weight: Tensor, factor: Tensor, pair: Tensor, term: Tensor, limit: Tensor
) -> tuple[Tensor, Tensor]:
    """Four instructions: the product, a comparison of its halves as numbers, or, and."""
    word = (factor.long() * (pair.long() & 0xFFFFFFFF) + term.long()) & 0xFFFFFFFF
    odd = torch.arange(weight.shape[-1]) % 2 == 1

    def number(half: Tensor) -> Tensor:
        return (half & 0xFFFF).to(torch.uint16).view(torch.float16)

    dropped = number(torch.where(odd, word >> 16, word)) < number(limit.long())
    return torch.where(dropped, -weight, weight), weight.masked_fill(dropped, 0.0)


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's module, whose launches the emulator runs, under two schedules of the groups."""
    if torch.cuda.is_available():
        pytest.skip("the card itself is there")
    from acmoe.ops.attention.hopper import dropout as attention_dropout
    from acmoe.ops.attention.hopper import forward as attention_hopper
    from gluon_emulator import emulate, register_asm

    register_asm(attention_dropout.SIGNED_DROPOUT_ASM.value, packed_signed_dropout)
    register_asm(
        attention_dropout.DROPOUT_ASM.value, lambda *words: packed_signed_dropout(*words)[1]
    )
    kernel = emulate(attention_hopper.forward_kernel, seed=request.param)
    monkeypatch.setattr(attention_hopper, "forward_kernel", kernel)
    return attention_hopper


def draw(
    S: int, L: int, W: int, P: int, features: int, masked: bool, dtype: torch.dtype,
    device: str = "cpu",
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(S + L + W)
    sizes = ((B, H, L, P), (B, H, S + L, P), (B, H, S + L, P), (P, W))
    q, k, v, table = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    for tensor in (q, k, v):
        tensor[..., features:] = 0
    table[features:] = 0
    mask = torch.rand(B, S + L, generator=generator) < 0.7 if masked else None
    if mask is not None:
        mask[0, :70] = False  # a tile and more
    bits = torch.randint(-(2**31), 2**31, (B, H, L), dtype=torch.int32, generator=generator)
    scale = 1 / math.sqrt(features)
    distance_LN = S + torch.arange(L)[:, None] - torch.arange(S + L)[None, :]
    window = (distance_LN >= 1) & (distance_LN <= W)
    column_LN = (W - distance_LN).clamp(0, W - 1)
    position = (q.double() @ table.double()).gather(-1, column_LN.expand(B, H, -1, -1))
    score = (q.double() @ k.double().mT + position) * scale
    score = score.masked_fill(~window, -torch.inf)
    if mask is not None:
        score = score.masked_fill(~mask[:, None, None, :], -torch.inf)
        mask = mask.to(device)
    given = (*(t.to(device) for t in (q, k, v, table)), mask, bits.to(device), scale)
    return Case(S, L, W, given, features, score, window)


def run(kernels: Any, case: Case, dropout: float, keeps: bool = True) -> tuple[Tensor, ...]:
    """Output, log2 of sums, weights and their bases; memory nobody writes holds NaN."""
    from acmoe.ops.attention.hopper.saved_weights import SavedWeights, saved_sizes

    q = case.arguments[0]
    sizes = saved_sizes(q.shape, case.S + case.L, case.W) if keeps else (0, (0,))
    row_max = torch.full(sizes[1], torch.nan).to(q.device)
    kept = SavedWeights(q.new_full((sizes[0],), torch.nan), row_max)
    out, lse = kernels.run_forward(Inputs(*case.arguments, dropout, case.features), kept)
    return tuple(tensor.cpu() for tensor in (out, lse, *kept))


def sizes_of(case: Case) -> tuple[int, int]:
    """Numbers from row to row, and the column of key 0 in row 0, in eights."""
    from acmoe.ops.attention.triton.skew import ROW_GAP, SkewLayout

    left = (case.S - case.W) % 8
    columns = -(-(case.W + left + 7) // 16) * 16
    pitch = SkewLayout(H, case.L, case.S + case.L, case.W, ROW_GAP).pitch
    # Rows do not meet, and eight queries on, less 8 elements, is a multiple of 128 bytes.
    assert pitch >= columns + 192 and (pitch - 8) % 64 == 0
    return pitch, (case.W - case.S + left) // 8


def starts(case: Case) -> Tensor:
    """(B, H, L) places of key 0 of each query."""
    pitch, shift = sizes_of(case)
    x = torch.arange(B * H).view(B, H, 1)
    i = torch.arange(case.L)
    row = i % 8 * (B * H * case.L // 8) + x * (case.L // 8) + i // 8
    return MARGIN + row * pitch + (shift - i // 8) * 8


def weights_at(case: Case, flat: Tensor) -> Tensor:
    """(B, H, L, N) what is kept of each query and key."""
    return flat[starts(case)[..., None] + torch.arange(case.S + case.L)].double()


def check_weights(case: Case, lse: Tensor, flat: Tensor, base: Tensor) -> None:
    """Magnitudes are those of the softmax, and bases its peaks so far."""
    peak = case.score.max(-1, keepdim=True).values.clamp(min=-1e30)
    share = torch.exp(case.score - peak)
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    tile_of = torch.arange(case.S + case.L) // 64
    base_BHLN = base.double()[:, :, tile_of].transpose(2, 3)
    weight = weights_at(case, flat).abs() * torch.exp2(base_BHLN - lse.double()[..., None])
    weight = torch.where(case.window, weight, 0.0)
    # 2^-9 a rounding, of a position's score and of a weight.
    assert (weight - share).norm() <= 0.01 * share.norm()
    highest = (case.score / math.log(2)).cummax(-1).values
    highest = torch.where(highest.isfinite(), highest, 0.0)
    for tile in range(base.shape[2]):
        last = min(64 * tile + 63, case.S + case.L - 1)
        visited = case.window[:, 64 * tile : last + 1].any(-1)
        error = base[:, :, tile].double() - highest[..., last]
        assert error[..., visited].abs().max() < 0.05 if visited.any() else True


def check_places(case: Case, flat: Tensor) -> None:
    """Weights written outside of windows are zero, and lie in a row or beside it."""
    first_BHL = starts(case)
    pitch = sizes_of(case)[0]
    assert flat.numel() == 2 * MARGIN + B * H * case.L * pitch
    inside = torch.zeros(flat.numel(), dtype=torch.bool)
    for i in range(case.L):
        keys = torch.arange(max(case.S + i - case.W, 0), case.S + i)
        inside[first_BHL[..., i, None] + keys] = True
    assert inside.sum() == B * H * case.window.sum()
    assert flat[inside].isfinite().all()
    assert (flat[~inside].isnan() | (flat[~inside] == 0)).all()
    # A visited tile is written whole.
    for i in range(case.L):
        i0 = i // 128 * 128
        start = max(case.S + i0 - case.W, 0) // 64 * 64
        end = case.S + min(i0 + 128, case.L) - 1
        keys = torch.arange(start, start + -(-(end - start) // 64) * 64)
        assert flat[first_BHL[..., i, None] + keys].isfinite().all()


@mostly_slow(("S", "L", "W", "P", "features", "masked", "dtype"), SHAPES, keep=(3,))
def test_the_weights_of_the_softmax_are_kept_each_in_its_place(
    S: int, L: int, W: int, P: int, features: int, masked: bool, dtype: torch.dtype, kernels: Any
) -> None:
    case = draw(S, L, W, P, features, masked, dtype)
    out, lse, flat, base = run(kernels, case, 0.0)
    check_weights(case, lse, flat, base)
    check_places(case, flat)
    assert not (weights_at(case, flat) < 0).any()
    alone = run(kernels, case, 0.0, keeps=False)
    assert torch.equal(out, alone[0]) and torch.equal(lse, alone[1])


def falls(bits_BHL: Tensor, num_keys: int, dropout: float) -> Tensor:
    """(B, H, L, N) True where ops/device/dropout_rng.py drops, in integer arithmetic: the random
    number of a key is its 16-bit half of a 32-bit product, and the key is dropped if that is one of
    the dropout * 2^16 values from 0xFC00 (minus infinity as float16) down."""

    def mixed(x: Tensor) -> Tensor:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ (x >> 16)

    pair = torch.arange(num_keys) // 2
    low = ((pair + 1) * 0x9E35) & 0xFFFF
    low = ((low ^ (low >> 8)) * 0xCA6B) & 0xFFFF
    high = mixed(((pair + 1) * 0x9E3779B1) & 0xFFFFFFFF) & 0xFFFF0000
    row = (bits_BHL.long() & 0xFFFFFFFF)[..., None]
    word = (row | 1) * (high | low ^ (low >> 7)) + (row >> 16) * 0x10001
    half = torch.where(torch.arange(num_keys) % 2 == 1, word >> 16, word) & 0xFFFF
    return (half <= 0xFC00) & (half > 0xFC00 - round(dropout * 2**16))


def check_signs(case: Case, dropped: tuple[Tensor, ...], whole: tuple[Tensor, ...]) -> None:
    """Dropout sets the sign of dropped weights and changes nothing else that is saved; the saved
    weights are those that multiplied the values."""
    weight, expected = (weights_at(case, found[2]) for found in (dropped, whole))
    fallen = falls(case.arguments[5].cpu(), case.S + case.L, 0.3)
    signed = torch.where(fallen, -expected, expected)
    assert torch.equal(weight[:, :, case.window], signed[:, :, case.window])
    assert torch.equal(dropped[3].nan_to_num(7), whole[3].nan_to_num(7))
    tile_of = torch.arange(case.S + case.L) // 64
    base_BHLN = dropped[3].double()[:, :, tile_of].transpose(2, 3)
    left = weight.clamp(min=0) * torch.exp2(base_BHLN - dropped[1].double()[..., None])
    left = torch.where(case.window, left, 0.0) / (1 - round(0.3 * 2**16) / 2**16)
    out = left @ case.arguments[2].cpu().double()[..., : case.features]
    # Weights are the same 16 bits: what is left is the rounding of the output.
    assert (dropped[0].double() - out).norm() <= 0.004 * out.norm()


@mostly_slow(("S", "L", "W", "P", "features", "masked", "dtype"), [SHAPES[3], *SHAPES[:2]])
def test_a_weight_that_dropout_drops_is_kept_with_a_sign(
    S: int, L: int, W: int, P: int, features: int, masked: bool, dtype: torch.dtype, kernels: Any
) -> None:
    case = draw(S, L, W, P, features, masked, dtype)
    check_signs(case, run(kernels, case, 0.3), run(kernels, case, 0.0))
    check_places(case, run(kernels, case, 0.3)[2])


def test_a_buffer_for_queries_that_are_no_multiple_of_eight_is_refused(kernels: Any) -> None:
    case = draw(32, 36, 32, 16, 16, False, torch.bfloat16)
    with pytest.raises(AssertionError):
        run(kernels, case, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("S", "L", "W", "P", "features", "masked", "dtype"),
    [(512, 304, 512, 64, 44, False, torch.bfloat16), *SHAPES],
)
def test_on_the_card_the_same_is_kept(
    S: int, L: int, W: int, P: int, features: int, masked: bool, dtype: torch.dtype
) -> None:
    from acmoe.ops.attention.hopper import forward as attention_hopper
    from acmoe.ops.attention.support import hopper_unsupported

    case = draw(S, L, W, P, features, masked, dtype, "cuda")
    q, k, v = case.arguments[:3]
    reason = hopper_unsupported(q, torch.stack([k, v]), W, 0.0)
    if reason is not None:
        pytest.skip(reason)
    whole, dropped, alone = (
        run(attention_hopper, case, share, keeps)
        for share, keeps in ((0.0, True), (0.3, True), (0.3, False))
    )
    check_weights(case, whole[1], whole[2], whole[3])
    check_signs(case, dropped, whole)
    for found in (whole, dropped):
        check_places(case, found[2])
    assert torch.equal(dropped[0], alone[0]) and torch.equal(dropped[1], alone[1])
