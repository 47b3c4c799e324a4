"""The kernels of sliding-window attention against the definition, outputs and gradients.

Shapes: B streams, H heads, L queries, S keys before them, N = S + L, W span, P features of a head.
"""

import logging

import pytest
import torch
from attention_cases import Shape, draw, padding, with_gradients
from torch import Tensor

from acmoe.ops import dispatch as backend
from acmoe.ops.attention.op import (
    _window_attention,
    fused_window_attention,
    joined_window_attention,
)
from acmoe.ops.attention.reference import window_attention, window_attention_reference
from slow_cases import mostly_slow, slow_on_cpu


@pytest.fixture
def poisoned(request: pytest.FixtureRequest, device: str) -> None:
    """NaN in memory nobody wrote; cuBLAS refuses the mode that writes it."""
    if device == "cpu":
        request.getfixturevalue("poisoned_empty")


# Memory as long as a window, shorter, and none; windows shorter and longer than the segment; a
# multiple of eight queries, one more and one less; more than one tile of 32 either way; keys that
# nobody sees.
SHAPES = [
    Shape(7, 5, 7),
    Shape(0, 20, 33, features=44, streams=1, heads=1),
    Shape(33, 16, 33, features=44, streams=1, heads=1),
    Shape(11, 17, 33, heads=1),
    Shape(9, 15, 9, streams=1, heads=3),
    Shape(0, 40, 7, streams=1),
    Shape(0, 2, 1),
    Shape(70, 37, 70, streams=1, heads=1),
    Shape(0, 75, 90, streams=1, heads=1),
    Shape(90, 40, 9, streams=1, heads=1),
]


def assert_equal_the_definition(
    shape: Shape, masked: bool, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    *tensors, upstream = draw(shape, device, dtype)
    options = {"span": shape.span, "key_mask": padding(shape, device) if masked else None}
    found = with_gradients(fused_window_attention, tensors, upstream, **options)
    wide = [tensor.double() for tensor in tensors]
    expected = with_gradients(window_attention_reference, wide, upstream.double(), **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        # The one: a window of a single key has gradients of exactly 0.
        assert (one.double() - other).norm() <= tolerance * (1 + other.norm())


# Two shapes, one of them with a mask, and one more on a GPU; the others are slow.
QUICK = {3: True, 8: False} | ({6: False} if torch.cuda.is_available() else {})
ALTERNATING = [
    pytest.param(shape, masked, marks=[] if QUICK.get(place) == masked else [pytest.mark.slow])
    for place, shape in enumerate(SHAPES)
    for masked in (False, True)
]


@pytest.mark.parametrize(("shape", "masked"), ALTERNATING)
def test_output_and_gradients_equal_the_definition(
    shape: Shape, masked: bool, device: str, poisoned: None
) -> None:
    assert_equal_the_definition(shape, masked, device, torch.float32, 2e-6)


def test_bfloat16_is_off_by_its_own_rounding(device: str) -> None:
    # 8 bits of mantissa: 2^-9 a rounding, of which scores, weights and gradients go through a few.
    shape = Shape(17, 20, 17, features=20, heads=1)
    assert_equal_the_definition(shape, True, device, torch.bfloat16, 0.02)


def test_parts_of_wider_tensors_and_a_turned_mask_are_read_as_they_are(device: str) -> None:
    shape = Shape(9, 12, 9, features=16, heads=1)
    q, k, v, table, upstream = draw(shape, device)
    mask_BN = padding(shape, device)

    def apart(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_mask: Tensor) -> Tensor:
        k, v = torch.cat([k, v], dim=-1).chunk(2, dim=-1)  # a key every 32 numbers
        return fused_window_attention(q, k, v, span=9, positions=positions, key_mask=key_mask)

    turned = mask_BN.T.contiguous().T
    found = with_gradients(apart, (q, k, v, table), upstream, key_mask=turned)
    options = {"span": 9, "key_mask": mask_BN}
    expected = with_gradients(fused_window_attention, (q, k, v, table), upstream, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_memory_of_zeros_takes_its_share_of_attention(device: str) -> None:
    # The published model's empty memory: keys and values of zero that are seen like others.
    shape = Shape(17, 9, 17, heads=1)
    q, k, v, table, upstream = draw(shape, device)
    k[:, :, :17] = v[:, :, :17] = 0
    found = with_gradients(fused_window_attention, (q, k, v, table), upstream, span=17)
    expected = with_gradients(window_attention_reference, (q, k, v, table), upstream, span=17)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    hidden = torch.arange(26, device=device).expand(2, 26) >= 17
    masked = fused_window_attention(q, k, v, span=17, positions=table, key_mask=hidden)
    assert (found[0] - masked).abs().max() > 0.1


def test_a_query_that_sees_nothing_gets_zeros_and_gives_none(device: str, poisoned: None) -> None:
    shape = Shape(6, 18, 9, heads=1)
    *tensors, upstream = draw(shape, device)
    key_mask = torch.ones(2, 24, dtype=torch.bool, device=device)
    key_mask[0] = False
    found = with_gradients(fused_window_attention, tensors, upstream, span=9, key_mask=key_mask)
    for one in found[:4]:
        assert not one[0].any() and torch.isfinite(one).all()
    alone = [tensor[1:] for tensor in tensors[:3]] + tensors[3:]
    expected = with_gradients(fused_window_attention, alone, upstream[1:], span=9)
    assert torch.equal(found[0][1], expected[0][0])
    torch.testing.assert_close(found[4], expected[4])


# As a product with both weights leaves them in memory, (B, N, 2, H, P); one after the other; and
# with features far apart, which is copied.
@pytest.mark.parametrize(
    "order",
    [
        (1, 3, 0, 2, 4),
        pytest.param((0, 1, 2, 3, 4), marks=pytest.mark.slow),
        pytest.param((1, 2, 3, 4, 0), marks=pytest.mark.slow),
    ],
)
def test_keys_and_values_in_one_tensor_give_the_bits_of_two(
    order: tuple[int, ...], device: str, poisoned: None
) -> None:
    # Heads of 12 features filled up with zeros to 16.
    q, k, v, table, upstream = draw(Shape(9, 18, 9, features=12), device)
    back = [order.index(place) for place in range(5)]
    kv = torch.nn.functional.pad(torch.stack([k, v]), (0, 4)).permute(order).contiguous()
    leaves = [tensor.requires_grad_() for tensor in (q, kv.permute(back).detach(), table)]
    out = joined_window_attention(leaves[0], leaves[1], span=9, positions=leaves[2])
    assert out.shape[-1] == 16 and not out[..., 12:].any()
    assert out.transpose(1, 2).is_contiguous()
    wide = torch.nn.functional.pad(upstream, (0, 4))
    dq, dkv, dtable = torch.autograd.grad(out, leaves, wide)
    found = [out.detach()[..., :12], dq, *dkv[..., :12], dtable]
    expected = with_gradients(fused_window_attention, (q, k, v, table), upstream, span=9)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not dkv[..., 12:].any()
    if order[-1] == 4:  # features side by side: nothing was copied on the way back
        assert dkv.permute(order).is_contiguous()


@slow_on_cpu
def test_repeated_runs_are_equal_in_every_bit(device: str) -> None:
    shape = Shape(9, 12, 9, heads=1)
    *tensors, upstream = draw(shape, device)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        options = {"span": 9, "key_mask": padding(shape, device), "dropout": 0.3}
        runs.append(with_gradients(fused_window_attention, tensors, upstream, **options))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.slow
def test_groups_of_streams_change_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from acmoe.ops.attention.triton import skew as attention_skew

    shape = Shape(9, 18, 9, streams=3)
    *tensors, upstream = draw(shape, device)
    runs = []
    for limit in (2**30, 1, 2 * 2 * 24 * 32 * 4):  # all streams, one, then two of them at a time
        monkeypatch.setattr(attention_skew, "_MAX_SCORE_BYTES", limit)
        torch.manual_seed(3)
        options = {"span": 9, "key_mask": padding(shape, device), "dropout": 0.3}
        runs.append(with_gradients(fused_window_attention, tensors, upstream, **options))
    for run in runs[1:]:
        # The gradient of the table goes through a product of a whole group, which sums in an order
        # that hangs on its size.
        for name, one, other in zip(("out", "q", "k", "v", "table"), run, runs[0], strict=True):
            tolerance = 1e-5 if name == "table" else 0.0
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_other_tiles_change_only_the_rounding(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from acmoe.ops.attention.triton import backward, forward, queries
    from acmoe.ops.device.block_sizes import Blocks

    *tensors, upstream = draw(Shape(50, 70, 50, streams=1, heads=1), device)
    runs = []
    for blocks in (Blocks(32, 32, 16, 4, 2), Blocks(64, 16, 16, 4, 2), Blocks(16, 64, 16, 4, 2)):
        for module in (forward, backward, queries):
            monkeypatch.setattr(module, "blocks_for", lambda *_, chosen=blocks: chosen)
        torch.manual_seed(3)
        options = {"span": 50, "dropout": 0.3}
        runs.append(with_gradients(fused_window_attention, tensors, upstream, **options))
    for run in runs[1:]:
        for one, other in zip(run, runs[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@slow_on_cpu  # test_fast_attention.py compiles a layer with it
@pytest.mark.filterwarnings("default")  # the compiler's own, not ours
def test_one_graph_holds_the_whole_of_it(device: str) -> None:
    shape = Shape(16, 16, 16, streams=1, heads=1)
    *tensors, upstream = draw(shape, device)
    options = {"span": 16, "key_mask": padding(shape, device)}
    whole = torch.compile(fused_window_attention, fullgraph=True, backend="aot_eager")
    found = with_gradients(whole, tensors, upstream, **options)
    expected = with_gradients(fused_window_attention, tensors, upstream, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = (*CHECKS, "test_aot_dispatch_dynamic")  # it traces the op as the compiler does


@mostly_slow(
    ("masked", "checks"), [(True, CHECKS), (True, TRACED), (False, TRACED)], gpu=(1,), ids=str
)
def test_the_op_keeps_torchs_contract(masked: bool, checks: tuple[str, ...], device: str) -> None:
    shape = Shape(9, 12, 9, features=16, streams=1, heads=1)
    q, k, v, table, _ = draw(shape, device)
    kv = torch.stack([k, v]).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    leaves = [tensor.requires_grad_() for tensor in (q, kv, table)]
    bits = torch.randint(-(2**31), 2**31, (1, 1, 12), dtype=torch.int32, device=device)
    mask = padding(shape, device) if masked else None
    arguments = (q, q.detach(), *leaves[1:], mask, bits, 0.25, 0.2, "auto")
    torch.library.opcheck(_window_attention, arguments, test_utils=checks)


def test_the_model_takes_the_kernel_where_it_can_and_says_so(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "_logged", set())
    caplog.set_level(logging.INFO, "acmoe")
    q, k, v, table, _ = draw(Shape(8, 16, 8), device, torch.bfloat16)
    for name in ("triton", "torch"):
        with backend.use_backend(name):
            found = window_attention(q, k, v, span=8, positions=table)
        expected = window_attention_reference(q, k, v, span=8, positions=table)
        assert (found - expected).norm() <= 0.02 * expected.norm()
    with backend.use_backend("triton"):
        window_attention(q, k, v, span=8)
        window_attention(q[:, :, -1:], k, v, span=23, positions=table.new_zeros(6, 23))
    messages = [record.message for record in caplog.records]
    refusal = "window_attention: triton cannot serve,"
    forward = messages.pop(1)  # which of two kernels hangs on the card
    if device == "cpu":
        reason = "its kernels need a CUDA device, not cpu"
        assert forward == f"window_attention's forward runs on triton; gluon: {reason}"
    assert messages == [
        "window_attention runs on triton",
        "window_attention runs on torch",
        f"{refusal} its kernel is for relative positions; running on torch",
        f"{refusal} its kernel is for 16 queries or more, not 1; running on torch",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(512, 200, 512, 44, 2, 4), Shape(0, 300, 128, 128, 1, 2), Shape(7, 16, 64, 18)]
)
def test_tiles_of_16_bits_equal_the_definition(shape: Shape, masked: bool) -> None:
    assert_equal_the_definition(shape, masked, "cuda", torch.bfloat16, 0.02)
