"""Attention where a map's tokens lie, against windows that are cut out, in float64.

Shapes: B images, Y rows and X columns of the map, D features, H heads, N tokens of a window.
"""

import logging

import pytest
import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.fast import accelerate, images
from acmoe.models.images.window import WindowAttention
from acmoe.ops import dispatch as backend
from acmoe.ops.dispatch import use_backend
from acmoe.ops.map_attention.op import map_attention
from slow_cases import mostly_slow, slow_on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

CASES = [
    # size, window, shifted, heads of 6 features
    ((4, 6), 2, False, 2),
    ((4, 6), 2, True, 2),  # every edge window holds two or four pieces
    ((6, 9), 3, True, 3),  # 9 tokens of a tile of 16
    ((5, 10), 5, True, 2),  # 25 of 32, and shifted along one side alone
    ((3, 3), 7, True, 2),  # a map within one window
    pytest.param((14, 7), 7, True, 1, marks=pytest.mark.slow),  # 49 of 64, as published
]


def attention(window: int, heads: int, shifted: bool, position: str = "table") -> WindowAttention:
    torch.manual_seed(0)
    dim = 6 * heads
    module = WindowAttention(
        dim=dim, heads=heads, window=window, shifted=shifted, position=position
    )
    accelerate(module)
    return module


def gradients(module: WindowAttention, x_BYXD: Tensor, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of its weighted sum."""
    x_BYXD = x_BYXD.clone().requires_grad_()
    out = module(x_BYXD)
    wrt = (x_BYXD, *module.parameters())
    return [out, *torch.autograd.grad((out * weight).sum(), wrt)]


@mostly_slow(("size", "window", "shifted", "heads"), CASES, ids=str, keep=(1, 4))
def test_a_map_in_place_is_its_windows_cut_out(
    size: tuple[int, int],
    window: int,
    shifted: bool,
    heads: int,
    generator: torch.Generator,
    device: str,
) -> None:
    module = attention(window, heads, shifted)
    x_BYXD = torch.randn(2, *size, 6 * heads, generator=generator)
    weight = torch.randn(x_BYXD.shape, generator=generator)
    wanted = gradients(module.double(), x_BYXD.double(), weight.double())
    half = device == "cuda"  # where the kernel takes nothing wider
    ours = module.to(device, torch.bfloat16 if half else torch.float32)
    with use_backend("triton"):
        found = gradients(ours, *(t.to(device, ours.qkv.weight.dtype) for t in (x_BYXD, weight)))
    for got, right in zip(found, wanted, strict=True):
        scale = right.abs().max().clamp(min=1e-3)
        error = (got.cpu().double() - right).abs().max() / scale
        assert error < (5e-2 if half else 1e-5), error


@mostly_slow("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_off_by_their_own_rounding(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    module = attention(3, 2, True)
    x_BYXD, weight = torch.randn(2, 1, 6, 6, 12, generator=generator)
    wanted = gradients(module.double(), x_BYXD.double(), weight.double())
    with use_backend("triton"):
        ours = module.to(device, dtype)
        found = gradients(ours, x_BYXD.to(device, dtype), weight.to(device, dtype))
    for got, right in zip(found, wanted, strict=True):
        assert (got.cpu().double() - right).norm() < 0.02 * right.norm().clamp(min=1e-2)


def test_windows_that_do_not_fill_the_map_are_refused() -> None:
    with pytest.raises(UserError, match="5 x 4 tokens"):
        map_attention(torch.zeros(1, 5, 4, 12), torch.zeros(1, 4, 4), window=(2, 2), shift=(0, 0))


def test_windows_and_heads_too_large_for_a_tile_are_cut_out_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    monkeypatch.setattr(backend, "_logged", set())
    options = {"window": 9, "shifted": True, "position": "table"}
    module = accelerate(WindowAttention(dim=129, heads=1, **options).to(device, torch.bfloat16))
    caplog.set_level(logging.INFO, "acmoe")
    x_BYXD = torch.randn(1, 9, 18, 129, device=device, dtype=torch.bfloat16)
    found = []
    for name in ("triton", "triton", "torch"):
        with use_backend(name):
            found.append(module(x_BYXD))
    assert torch.equal(found[0], found[2])
    (line,) = (m for m in caplog.messages if m.startswith("windows are cut out of their map"))
    assert "not 81 and 129" in line


def test_it_is_the_kernel_that_runs(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator, device: str
) -> None:
    module = attention(2, 2, True).to(device).requires_grad_(False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x_BYXD = torch.randn(1, 4, 4, 12, generator=generator).to(device, dtype)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("cut out")

    monkeypatch.setattr(images, "attend_by_windows", refuse)
    with use_backend("triton"):
        module.to(dtype)(x_BYXD)
    with use_backend("torch"), pytest.raises(AssertionError, match="cut out"):
        module(x_BYXD)


@slow_on_cpu
def test_equal_calls_give_equal_bits_of_the_bias_gradient(
    generator: torch.Generator, device: str
) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = torch.randn(3, 4, 4, 3 * 8, generator=generator).to(device, dtype)
    bias = torch.randn(2, 4, 4, generator=generator).to(device).requires_grad_()
    found = []
    for _ in range(3):
        out = map_attention(qkv, bias, window=(2, 2), shift=(1, 1))
        found += torch.autograd.grad(out.float().square().sum(), bias)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert found[0].dtype == torch.float32 and found[0].abs().max() > 0


def test_the_compiler_sees_one_op(generator: torch.Generator, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = torch.randn(1, 4, 4, 3 * 8, generator=generator).to(device, dtype).requires_grad_()
    bias = torch.randn(2, 4, 4, generator=generator).to(device).requires_grad_()

    def loss(qkv: Tensor, bias: Tensor) -> Tensor:
        return map_attention(qkv, bias, window=(2, 2), shift=(1, 0)).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    plain, found = (torch.autograd.grad(f(qkv, bias), (qkv, bias)) for f in (loss, compiled))
    assert all(torch.equal(*pair) for pair in zip(plain, found, strict=True))
