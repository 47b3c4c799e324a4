"""The forward of window attention for Hopper: emulated on a CPU, and on the card if there is one.

Shapes: B streams, H heads, L queries, S keys before them, N = S + L, W span, P features of a head.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.ops.attention.inputs import Inputs
from acmoe.ops.attention.op import fused_window_attention
from acmoe.ops.attention.reference import window_attention_reference
from acmoe.ops.attention.support import fused_width, hopper_unsupported
from slow_cases import mostly_slow


def packed_dropout(
    weight: Tensor, factor: Tensor, pair: Tensor, term: Tensor, limit: Tensor
) -> Tensor:
    """Three instructions: the product, a comparison of its halves as numbers, and."""
    word = (factor.long() * (pair.long() & 0xFFFFFFFF) + term.long()) & 0xFFFFFFFF
    odd = torch.arange(weight.shape[-1]) % 2 == 1

    def number(half: Tensor) -> Tensor:
        return (half & 0xFFFF).to(torch.uint16).view(torch.float16)

    dropped = number(torch.where(odd, word >> 16, word)) < number(limit.long())
    return weight.masked_fill(dropped, 0.0)


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's module, whose launches the emulator runs, under two schedules of the groups."""
    if torch.cuda.is_available():
        pytest.skip("the card itself is there")
    from acmoe.ops.attention.hopper import dropout as attention_dropout
    from acmoe.ops.attention.hopper import forward as attention_hopper
    from gluon_emulator import emulate, register_asm

    register_asm(attention_dropout.DROPOUT_ASM.value, packed_dropout)
    kernel = emulate(attention_hopper.forward_kernel, seed=request.param)
    monkeypatch.setattr(attention_hopper, "forward_kernel", kernel)
    return attention_hopper


def draw(
    S: int, L: int, W: int, P: int, features: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and table, zeros beyond `features`; a mask; and bits."""
    generator = torch.Generator().manual_seed(S + L + W)
    sizes = ((1, 2, L, P), (1, 2, S + L, P), (1, 2, S + L, P), (P, W))
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    for tensor in tensors[:3]:
        tensor[..., features:] = 0
    tensors[3][features:] = 0
    seen_BN = torch.rand(1, S + L, generator=generator) < 0.7
    bits = torch.randint(-(2**31), 2**31, (1, 2, L), dtype=torch.int32, generator=generator)
    return tensors, seen_BN, bits


def nothing_kept() -> Any:
    from acmoe.ops.attention.hopper.saved_weights import SavedWeights

    return SavedWeights(torch.empty(0), torch.empty(0))


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected.double()).norm() <= tolerance * expected.double().norm())


# Memory as long as a window, longer than it, none; tiles of queries and keys that are not whole; a
# table that begins before the first tile, and inside it.
@mostly_slow(
    ("S", "L", "W", "P", "features", "masked"),
    [
        (109, 150, 109, 64, 44, True),
        (40, 100, 90, 64, 50, True),
        (0, 140, 128, 32, 32, False),
        (200, 20, 263, 16, 9, True),
        (36, 256, 64, 16, 16, False),
    ],
    keep=(3,),
    gpu=(1,),
)
def test_the_emulated_kernel_equals_the_definition(
    S: int, L: int, W: int, P: int, features: int, masked: bool, emulated: Any
) -> None:
    tensors, seen_BN, bits = draw(S, L, W, P, features)
    mask = seen_BN if masked else None
    arguments = Inputs(*tensors, mask, bits, 1 / math.sqrt(P), 0.0, features)
    out, lse = emulated.run_forward(arguments, nothing_kept())
    q, k, v, table = (tensor.double() for tensor in tensors)
    expected = window_attention_reference(q, k, v, span=W, positions=table, key_mask=mask)
    # 8 bits of mantissa: 2^-9 a rounding, of positions' scores, weights and the output.
    assert torch.isfinite(out).all() and close(out, expected[..., :features], 0.01)
    assert out.transpose(1, 2).is_contiguous()  # heads side by side, as a product reads them
    # With ones for values weights are 1 / sum: exp(score) / 2^lse of a key sums to one.
    every = torch.eye(S + L).double().expand(1, 2, -1, -1)
    weight = window_attention_reference(q, k, every, span=W, positions=table, key_mask=mask)
    nearest = weight.argmax(-1, keepdim=True)
    score = q.unsqueeze(-2) @ k.gather(2, nearest.expand(*nearest.shape[:-1], P)).unsqueeze(-1)
    distance = S + torch.arange(L)[:, None] - nearest
    position = (q @ table).gather(-1, (W - distance).clamp(0, W - 1))
    score = (score[..., 0, 0] + position[..., 0]) / math.sqrt(P)
    implied = score / math.log(2) - weight.gather(-1, nearest)[..., 0].log2()
    sees = weight.sum(-1) > 0
    assert (lse.double() - implied)[sees].abs().max() < 0.05
    assert not lse[~sees].any()


@pytest.mark.parametrize(
    ("features", "dtype"),
    [(16, torch.bfloat16), pytest.param(48, torch.float16, marks=pytest.mark.slow)],
)
def test_it_drops_what_the_portable_kernel_drops(
    features: int, dtype: torch.dtype, emulated: Any
) -> None:
    from acmoe.ops.attention.triton import forward as attention

    tensors, seen_BN, bits = draw(70, 130, 90, fused_width(features), features, dtype)
    arguments = Inputs(*tensors, seen_BN, bits, 0.25, 0.3, features)
    out, lse = emulated.run_forward(arguments, nothing_kept())
    expected, expected_lse = attention.run_forward(arguments)
    assert close(out, expected, 0.01) and (lse - expected_lse).abs().max() < 0.05
    assert not close(out, attention.run_forward(arguments._replace(dropout=0.0))[0], 0.2)


def test_a_longer_window_needs_more_shared_memory() -> None:
    from acmoe.ops.attention.hopper.forward import shared_bytes

    # Two programs of 113 KB an SM at the paper's window, none at all at sixty thousand.
    assert shared_bytes(44, 2048) <= 113 * 1024 < shared_bytes(44, 4096)
    assert shared_bytes(44, 60_000) > 227 * 1024


def test_a_cpu_has_another_kernel() -> None:
    q, kv = torch.zeros(1, 1, 16, 64), torch.zeros(2, 1, 1, 16, 64)
    assert hopper_unsupported(q, kv, 16, 0.0) == "its kernels need a CUDA device, not cpu"


@pytest.mark.parametrize(
    ("width", "beside", "span", "dropout", "dtype", "reason"),
    [
        (64, 0, 2048, 0.1, torch.bfloat16, None),
        (64, 0, 2048, 0.1, torch.float32, "numbers of 16 bits, not torch.float32"),
        (128, 0, 2048, 0.1, torch.bfloat16, "at most 64 features, not 128"),
        (64, 0, 2048, 0.5, torch.bfloat16, "drops at most 0.48, not 0.5"),
        (64, 4, 2048, 0.1, torch.bfloat16, "multiples of 16 bytes"),
        (64, 0, 60_000, 0.1, torch.bfloat16, "too little shared memory for a window of 60000"),
    ],
)
def test_what_keeps_a_call_from_the_kernel_is_said(
    width: int, beside: int, span: int, dropout: float, dtype: torch.dtype, reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from acmoe.ops.device import hopper

    monkeypatch.setattr(hopper, "gluon_unsupported", lambda device: None)
    q = torch.zeros(1, 1, 16, width, dtype=dtype)
    kv = torch.zeros(2, 1, 1, 16, width + beside, dtype=dtype)[..., :width]
    found = hopper_unsupported(q, kv, span, dropout)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("S", "L", "W", "P", "features", "masked"),
    [
        (512, 300, 512, 64, 44, False),
        (512, 300, 512, 64, 64, False),
        (0, 140, 128, 32, 32, True),
        (200, 77, 263, 16, 9, True),
    ],
)
def test_on_the_card_it_equals_the_portable_kernel(
    S: int, L: int, W: int, P: int, features: int, masked: bool, dropout: float
) -> None:
    tensors, seen_BN, bits = draw(S, L, W, P, features)
    tensors, seen_BN, bits = [t.cuda() for t in tensors], seen_BN.cuda(), bits.cuda()
    reason = hopper_unsupported(tensors[0], torch.stack(tensors[1:3]), W, dropout)
    if reason is not None:
        pytest.skip(reason)
    from acmoe.ops.attention.hopper import forward as attention_hopper
    from acmoe.ops.attention.triton import forward as attention

    mask = seen_BN if masked else None
    arguments = Inputs(*tensors, mask, bits, 1 / math.sqrt(P), dropout, features)
    runs = [attention_hopper.run_forward(arguments, nothing_kept()) for _ in range(2)]
    expected, expected_lse = attention.run_forward(arguments)
    for out, lse in runs:
        assert close(out, expected, 0.01) and (lse - expected_lse).abs().max() < 0.05
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.gpu
def test_gradients_agree_with_those_behind_the_portable_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from acmoe.ops.device import hopper

    (q, k, v, table), _, _ = draw(256, 200, 256, 44, 44)
    leaves = [tensor.cuda().requires_grad_() for tensor in (q, k, v, table)]
    reason = hopper.gluon_unsupported(leaves[0].device)
    if reason is not None:
        pytest.skip(reason)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        out = fused_window_attention(*leaves[:3], span=256, positions=leaves[3], dropout=0.1)
        found.append(torch.autograd.grad(out.float().square().sum(), leaves))
        monkeypatch.setattr(hopper, "gluon_unsupported", lambda device: "not today")
    assert all(close(one, other, 0.02) for one, other in zip(*found, strict=True))
