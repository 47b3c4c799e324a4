"""Attention that saves its weights for the backward: kernels for Hopper, emulated on a CPU.

Shapes: B streams, H heads, L queries, S keys before them, N = S + L, W span, P features of a head.
"""

import itertools
import logging
from typing import Any

import pytest
import torch
from attention_cases import with_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acmoe.errors import UserError
from acmoe.ops import dispatch as backend
from acmoe.ops.attention import support as attention_choice
from acmoe.ops.attention.op import fused_window_attention
from acmoe.ops.attention.reference import window_attention_reference
from acmoe.ops.attention.support import saving_unsupported
from slow_cases import mostly_slow


@pytest.fixture
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for Hopper serve: on the card if there is one, else emulated."""
    from acmoe.ops.attention.hopper import dropout as attention_dropout
    from acmoe.ops.attention.hopper import forward as attention_hopper
    from acmoe.ops.attention.hopper import keys as attention_keys
    from acmoe.ops.device import hopper as where

    monkeypatch.setattr(backend, "_logged", set())
    if torch.cuda.is_available():
        reason = where.gluon_unsupported(torch.device("cuda"))
        if reason is not None:
            pytest.skip(reason)
        return
    from gluon_emulator import emulate, register_asm

    def packed(weight: Tensor, factor: Tensor, pair: Tensor, term: Tensor, limit: Tensor) -> Any:
        """Signed and dropped weights: see test_attention_saved_weights.py."""
        word = (factor.long() * (pair.long() & 0xFFFFFFFF) + term.long()) & 0xFFFFFFFF
        half = torch.where(torch.arange(weight.shape[-1]) % 2 == 1, word >> 16, word) & 0xFFFF
        rand, low = (t.to(torch.uint16).view(torch.float16) for t in (half, limit.long() & 0xFFFF))
        return torch.where(rand < low, -weight, weight), weight.masked_fill(rand < low, 0.0)

    register_asm(attention_dropout.SIGNED_DROPOUT_ASM.value, packed)
    register_asm(attention_dropout.DROPOUT_ASM.value, lambda *words: packed(*words)[1])
    for module, name in ((attention_hopper, "forward_kernel"), (attention_keys, "keys_kernel")):
        monkeypatch.setattr(module, name, emulate(getattr(module, name), seed=0))
    monkeypatch.setattr(where, "gluon_unsupported", lambda device: None)
    monkeypatch.setattr(attention_choice, "memory_of", lambda device: 2**30)


def draw(
    S: int, L: int, W: int, features: int, device: str, streams: int = 1, heads: int = 1
) -> list[Tensor]:
    """q, k, v, table and a gradient of the output, of these streams and heads."""
    generator = torch.Generator().manual_seed(S + L + W)
    lead = (streams, heads)
    rows = (*lead, L, features), (*lead, S + L, features), (*lead, S + L, features)
    sizes = (*rows, (features, W), (*lead, L, features))
    return [torch.randn(size, generator=generator).to(device, torch.bfloat16) for size in sizes]


# Memory as long as a window, shorter, and none; queries that fill no tile.
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("S", "L", "W", "features"),
    [
        pytest.param(72, 136, 72, 44, marks=pytest.mark.slow),
        (20, 40, 90, 16),
        pytest.param(0, 72, 65, 20, marks=pytest.mark.slow),
    ],
)
def test_gradients_from_kept_weights_equal_the_definition(
    S: int, L: int, W: int, features: int, masked: bool, device: str, hopper: None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    *tensors, upstream = draw(S, L, W, features, device, streams=2, heads=2)
    mask = torch.arange(S + L, device=device).expand(2, -1) % 5 > 0 if masked else None
    options = {"span": W, "key_mask": mask}
    with caplog.at_level(logging.INFO, logger="acmoe"):
        found = with_gradients(fused_window_attention, tensors, upstream, **options)
    assert any(
        "attention saves its probabilities for the backward" in line for line in caplog.messages
    )
    wide = [tensor.double() for tensor in tensors]
    expected = with_gradients(window_attention_reference, wide, upstream.double(), **options)
    for one, other in zip(found, expected, strict=True):
        # 8 bits of mantissa: 2^-9 a rounding, of which there are a few on the way.
        assert (one.double() - other).norm() <= 0.02 * other.norm()


def test_kept_or_computed_again_the_same_weights_are_dropped(
    device: str, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    *tensors, upstream = draw(32, 40, 32, 16, device)
    runs = []
    for wanted in ("auto", "never"):
        monkeypatch.setenv("ACMOE_KEEP_ATTENTION", wanted)
        torch.manual_seed(0)
        runs.append(with_gradients(fused_window_attention, tensors, upstream, span=32, dropout=0.3))
    for one, other in zip(*runs, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_a_forward_can_be_differentiated_twice(device: str, hopper: None) -> None:
    q, k, v, table, upstream = draw(32, 32, 32, 16, device)
    out = fused_window_attention(q.requires_grad_(), k, v, positions=table, span=32, dropout=0.3)
    first, second = (
        torch.autograd.grad(out, q, upstream, retain_graph=retain)[0] for retain in (True, False)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("queries", "wanted", "memory", "reason"),
    [
        (64, "auto", 2**30, None),
        (64, "never", 2**30, "ACMOE_KEEP_ATTENTION=never"),
        (60, "auto", 2**30, "60 queries are no multiple of 8"),
        (1024, "auto", 2**30, "too little shared memory for 1024 queries of a head"),
        # A row of 64 distances and 7 of shift, filled up to 80, with 192 behind: 328 numbers, eight
        # more than a multiple of 64, for each of 64 queries, and 512 on either side.
        (64, "auto", 64 * 2 * (64 * 328 + 1024), None),
        (64, "auto", 64 * 2 * (64 * 328 + 1024) - 1, "they take 0 MiB a call, of 0 allowed"),
    ],
)
def test_what_keeps_weights_from_being_kept_is_said(
    queries: int, wanted: str, memory: int, reason: str | None, hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("ACMOE_KEEP_ATTENTION", wanted)
    monkeypatch.setattr(attention_choice, "memory_of", lambda device: memory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.zeros(1, 1, queries, 64, dtype=torch.bfloat16, device=device)
    kv = torch.zeros(2, 1, 1, 64 + queries, 64, dtype=torch.bfloat16, device=device)
    found = saving_unsupported(q, kv, 64, 0.1)
    assert found is None if reason is None else reason in str(found)


def test_nothing_is_kept_where_no_backward_can_come(
    device: str, hopper: None, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v, table, _ = draw(32, 32, 32, 16, device)
    with caplog.at_level(logging.INFO, logger="acmoe"):
        fused_window_attention(q, k, v, positions=table, span=32)
        with torch.no_grad():
            fused_window_attention(q.requires_grad_(), k, v, positions=table, span=32)
    assert not any("backward" in line for line in caplog.messages)


@mostly_slow(
    ("compiled", "name"),
    list(itertools.product([False, True], ["ACMOE_KEEP_ATTENTION", "ACMOE_GLUON"])),
    keep={0, 1, 2},
    gpu={3},
)
def test_an_unknown_option_is_named(
    name: str, compiled: bool, device: str, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "yes")
    q, k, v, table, _ = draw(32, 32, 32, 16, device)
    form = fused_window_attention
    if compiled:
        form = torch.compile(form, backend="eager")
    with pytest.raises(UserError, match=f"{name}='yes' is unknown; choose auto"):
        form(q.requires_grad_(), k, v, positions=table, span=32)
    torch._dynamo.reset()  # it remembers what it could not trace


def test_no_zeros_as_large_as_the_weights_are_made_for_the_backward(
    device: str, hopper: None
) -> None:
    made: list[int] = []

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if "zeros" in str(func) and isinstance(out, Tensor):
                made.append(out.numel())
            return out

    q, k, v, table, upstream = draw(32, 32, 32, 16, device)
    out = fused_window_attention(q.requires_grad_(), k, v, positions=table, span=32)
    with Zeros():
        torch.autograd.grad(out, q, upstream)
    assert max(made, default=0) <= 128  # a number a query; weights are over 200 of them


def test_an_output_that_a_hook_has_laid_elsewhere_is_read_where_it_is(
    device: str, hopper: None
) -> None:
    *tensors, upstream = draw(32, 32, 32, 16, device, heads=2)
    expected = with_gradients(fused_window_attention, tensors, upstream, span=32)
    packed = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t
    )
    with packed:
        found = with_gradients(fused_window_attention, tensors, upstream, span=32)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
