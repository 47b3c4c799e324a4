"""Dropout of attention's probabilities: forward and backward drop the same ones, each call others.

Shapes as in attention_cases.py.
"""

import math

import pytest
import torch
from attention_cases import Shape, draw, with_gradients
from torch import Tensor

from acmoe.ops.attention.op import _window_attention, fused_window_attention
from acmoe.ops.attention.reference import window_attention_reference


def survivors(bits: Tensor, num_keys: int, dropout: float) -> Tensor:
    """Which are kept, by 64-bit integers: halves of (a query's bits | 1) * (bits of a pair of keys)
    + the upper half of the query's bits in each; even keys have the low half. Dropped is a run of
    patterns that ends with 0xFC00."""
    word, short = 0xFFFFFFFF, 0xFFFF

    def times(bits: Tensor, factor: int | Tensor) -> Tensor:
        """In two halves, whose products fit 64 bits."""
        low, high = factor & short, factor >> 16
        return bits * low + ((bits * high & short) << 16) & word

    key = torch.arange(num_keys, device=bits.device)
    pair = times(key // 2 + 1, 0x9E3779B1)
    pair = times(pair ^ (pair >> 16), 0x85EBCA6B)
    pair = times(pair ^ (pair >> 13), 0xC2B2AE35)
    pair = pair ^ (pair >> 16)
    low = (key // 2 + 1) * 0x9E35 & short
    low = (low ^ (low >> 8)) * 0xCA6B & short
    pair = pair & ~short | low ^ (low >> 7)
    own = (bits.long() & word)[..., None]
    both = times(own | 1, pair) + (own >> 16) * 0x10001 & word
    half = torch.where(key % 2 == 0, both & short, both >> 16)
    return (0xFC00 - half & short) >= round(dropout * 2**16)


@pytest.mark.parametrize(
    "dropout",
    [pytest.param(0.1, marks=pytest.mark.slow), 0.7, pytest.param(0.99, marks=pytest.mark.slow)],
)
def test_forward_and_backward_drop_the_same_probabilities(dropout: float, device: str) -> None:
    shape = Shape(20, 37, 20, features=16)  # 16 needs no padding: the op itself is called
    *tensors, upstream = draw(shape, device)
    bits = torch.randint(-(2**31), 2**31, (2, 2, 37), dtype=torch.int32, device=device)
    keep = survivors(bits, 57, dropout)

    def fused(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        kv = torch.stack([k, v])
        return _window_attention(q, q.detach(), kv, positions, None, bits, 1 / 4, dropout, "auto")[
            0
        ]

    def definition(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        every = torch.eye(57, dtype=v.dtype, device=device).expand(2, 2, 57, 57)
        # 57 values of one-hot rows turn the reference's output into its probabilities.
        weight = window_attention_reference(q, k, every, span=20, positions=positions)
        return (weight * keep / (1 - round(dropout * 2**16) / 2**16)) @ v

    found = with_gradients(fused, tensors, upstream)
    wide = [tensor.double() for tensor in tensors]
    for one, other in zip(found, with_gradients(definition, wide, upstream.double()), strict=True):
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


def test_survivors_are_as_many_as_asked_and_know_nothing_of_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1, 1, 2000), dtype=torch.int32, generator=generator)
    # 0.1 in 2^-16 is 6,554 of them, 6e-6 more: a fiftieth of the sigma below.
    keep = survivors(bits, 500, 0.1)[0, 0].double() - 0.9
    # A million draws of variance 0.09; means of them, and of products of neighbours, at 5 sigma.
    assert abs(keep.mean().item()) < 5 * math.sqrt(0.09 / 1e6)
    for product in (
        *(keep[:, :-lag] * keep[:, lag:] for lag in (1, 2, 8, 64)),
        *(keep[:-lag] * keep[lag:] for lag in (1, 8)),
        keep[:-1, :-1] * keep[1:, 1:],
    ):
        assert abs(product.mean().item()) < 5 * 0.09 / math.sqrt(product.numel())
    # Nor do four corners of a rectangle, whose xor is 0.
    corners = keep[:-1, :-1] * keep[1:, :-1] * keep[:-1, 1:] * keep[1:, 1:]
    assert abs(corners.mean().item()) < 5 * 0.09**2 / math.sqrt(corners.numel())
    # Each query's and each key's share is that of independent draws too: variance 0.09 / number.
    assert keep.mean(1).var().item() == pytest.approx(0.09 / 500, rel=0.2)
    assert keep.mean(0).var().item() == pytest.approx(0.09 / 2000, rel=0.35)


def test_dropout_preserves_the_mean_and_every_call_draws_anew(device: str) -> None:
    # Equal scores and values of one: the output is the share kept, doubled.
    q, k = (torch.zeros(2, 4, length, 4, device=device) for length in (32, 64))
    v = torch.ones_like(k)
    options = {"span": 32, "positions": torch.zeros(4, 32, device=device), "dropout": 0.5}
    torch.manual_seed(0)
    first, second = (fused_window_attention(q, k, v, **options) for _ in range(2))
    # 32 probabilities each kept half the time: variance 1/32 a query, over 256 queries.
    assert first[..., 0].mean().item() == pytest.approx(1.0, abs=4 * math.sqrt(1 / 32 / 256))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(fused_window_attention(q, k, v, **options), first)


@pytest.mark.gpu
def test_every_replay_of_a_captured_graph_drops_anew() -> None:
    *tensors, upstream = draw(Shape(128, 64, 128, 44), "cuda", torch.bfloat16)

    def step() -> list[Tensor]:
        return with_gradients(fused_window_attention, tensors, upstream, span=128, dropout=0.3)

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([tensor.clone() for tensor in captured])
    for one, other in zip(*replays, strict=True):
        assert torch.isfinite(one).all() and not torch.equal(one, other)
