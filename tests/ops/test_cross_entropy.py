"""The chunked loss is the plain one, in value and gradient, without its memory.

Shapes: T tokens, D features, V words.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from acmoe.errors import UserError
from acmoe.ops.cross_entropy.op import chunked_cross_entropy, cross_entropy_reference
from largest_tensor import LargestTensor


def inputs(
    seed: int, num_tokens: int, num_words: int, *, dim: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, dim, generator=generator, dtype=dtype)
    weight = torch.randn(num_words, dim, generator=generator, dtype=dtype)
    bias = torch.randn(num_words, generator=generator, dtype=dtype)
    targets = torch.randint(num_words, (num_tokens,), generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def test_the_loss_of_two_words_is_the_one_worked_out_by_hand() -> None:
    # logits (0, ln 3) and (0, 0): losses -ln(3/4) and -ln(1/2), mean 0.4904.
    x = torch.tensor([[math.log(3.0)], [0.0]])
    weight = torch.tensor([[0.0], [1.0]])
    loss = chunked_cross_entropy(x, weight, None, torch.tensor([1, 0]))
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2, rel=1e-6)


# The compiler itself makes an instance of a torch.autograd.Function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_loss_has_the_gradients_of_the_plain_form() -> None:
    """Dynamo of torch 2.11 drops the gradient of a result that was added up in place."""
    x, weight, bias, targets = inputs(0, 7, 11)
    plain = cross_entropy_reference(x, weight, bias, targets, torch.ones(7, dtype=torch.bool))
    wanted = torch.autograd.grad(plain, (x, weight, bias))
    compiled = torch.compile(chunked_cross_entropy, fullgraph=True, backend="eager")
    loss = compiled(x, weight, bias, targets, chunk=3)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-13)
    found = torch.autograd.grad(loss, (x, weight, bias))
    for one, expected in zip(found, wanted, strict=True):
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(1, 17),
    num_words=st.integers(1, 13),
    chunk=st.integers(1, 20),
    with_bias=st.booleans(),
    masked=st.booleans(),
)
def test_loss_and_gradients_equal_the_plain_form(
    seed: int, num_tokens: int, num_words: int, chunk: int, with_bias: bool, masked: bool
) -> None:
    x, weight, bias, targets = inputs(seed, num_tokens, num_words)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    if masked:
        mask[1::2] = False
    wanted = [x, weight, *([bias] if with_bias else [])]
    used_bias = bias if with_bias else None
    plain = cross_entropy_reference(x, weight, used_bias, targets, mask)
    loss = chunked_cross_entropy(x, weight, used_bias, targets, chunk=chunk, token_mask=mask)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-13)
    # An upstream factor other than one must reach every gradient.
    for found, expected in zip(
        torch.autograd.grad(3.5 * loss, wanted),
        torch.autograd.grad(3.5 * plain, wanted),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_the_sum_is_the_mean_times_the_number_of_counted_tokens() -> None:
    x, weight, bias, targets = inputs(0, 9, 7)
    mask = torch.arange(9) % 3 != 0  # 6 tokens count
    mean = chunked_cross_entropy(x, weight, bias, targets, chunk=4, token_mask=mask)
    total = chunked_cross_entropy(
        x, weight, bias, targets, chunk=4, token_mask=mask, reduction="sum"
    )
    torch.testing.assert_close(total, 6 * mean, rtol=1e-13, atol=0.0)


class _Gemms(TorchDispatchMode):
    """Counts the matrix products inside the block."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def test_without_gradients_the_same_loss_takes_one_gemm_a_chunk_instead_of_three() -> None:
    *learned, targets = inputs(0, 6, 7)
    with _Gemms() as trained:
        wanted = chunked_cross_entropy(*learned, targets, chunk=2)
    with torch.no_grad(), _Gemms() as scored:
        found = chunked_cross_entropy(*learned, targets, chunk=2)
    assert found.item() == wanted.item() and not found.requires_grad
    # Three chunks: logits, and the gradients of the tokens and of the layer.
    assert (trained.count, scored.count) == (3 * 3, 3 * 1)


def test_single_losses_are_the_plain_ones_and_zero_where_masked() -> None:
    x, weight, bias, targets = inputs(1, 9, 7)
    mask = torch.arange(9) != 4
    with torch.no_grad():
        losses = chunked_cross_entropy(
            x, weight, bias, targets, chunk=2, token_mask=mask, reduction="none"
        )
        expected = F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")
    torch.testing.assert_close(losses, expected * mask, rtol=1e-12, atol=1e-13)


def test_single_losses_refuse_to_drop_a_gradient_in_silence() -> None:
    x, weight, bias, targets = inputs(1, 3, 4)
    with pytest.raises(UserError, match="carries no gradient"):
        chunked_cross_entropy(x, weight, bias, targets, reduction="none")


def test_targets_of_masked_tokens_are_not_read() -> None:
    x, weight, bias, targets = inputs(2, 6, 5)
    mask = torch.tensor([True, False, True, True, False, True])
    wild = targets.masked_fill(~mask, -100)
    expected = chunked_cross_entropy(x, weight, bias, targets, token_mask=mask)
    assert torch.equal(chunked_cross_entropy(x, weight, bias, wild, token_mask=mask), expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_targets_of_minus_100_do_not_count(padded: bool, with_bias: bool) -> None:
    x, weight, bias, targets = inputs(2, 9, 5)
    targets[[1, 4, 5]] = -100
    mask = torch.arange(9) < 7
    read = targets.masked_fill(~mask, -100) if padded else targets
    learned = [weight, *([bias] if with_bias else [])]
    plain = F.cross_entropy(F.linear(x, *learned), read, ignore_index=-100)
    given = x.detach().clone()
    if padded:
        given[~mask] = torch.nan  # padding may hold any values, an unscored token may not
    given.requires_grad_()
    options = {"token_mask": mask} if padded else {}
    layer = (learned[0], bias if with_bias else None)
    for chunk in (2, 9):
        loss = chunked_cross_entropy(given, *layer, targets, chunk=chunk, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-13)
        for found, expected in zip(
            torch.autograd.grad(loss, [given, *learned]),
            torch.autograd.grad(plain, [x, *learned], retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        single = chunked_cross_entropy(given, *layer, targets, reduction="none", **options)  # type: ignore[arg-type]
    assert (single != 0).tolist() == (read != -100).tolist()


def test_no_counted_token_gives_a_loss_of_zero_and_no_gradient() -> None:
    x, weight, bias, targets = inputs(3, 4, 5)
    loss = chunked_cross_entropy(
        x, weight, bias, targets, token_mask=torch.zeros(4, dtype=torch.bool)
    )
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, [weight])[0].any()


def test_logits_of_a_thousand_do_not_overflow() -> None:
    x = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    # The targets are the certain words, then the impossible ones: 0 and 2000 nats.
    certain = chunked_cross_entropy(x, weight, None, torch.tensor([0, 1]))
    hopeless = chunked_cross_entropy(x, weight, None, torch.tensor([1, 0]))
    assert certain.item() == 0
    assert hopeless.item() == 2000
    assert torch.isfinite(torch.autograd.grad(hopeless, [weight])[0]).all()


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    x, weight, bias, targets = inputs(4, 64, 50, dtype=torch.bfloat16)
    loss = chunked_cross_entropy(x, weight, bias, targets, chunk=7)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = F.cross_entropy(F.linear(*wide), targets)
    assert loss.dtype == torch.float32
    # bf16 keeps 8 bits: logits of size 5 are off by 0.02, averaged over 64 tokens.
    assert loss.item() == pytest.approx(exact.item(), abs=5e-3)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    (expected,) = torch.autograd.grad(exact, [wide[1]])
    torch.testing.assert_close(weight.grad.double(), expected, rtol=0.1, atol=2e-3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tensors_of_the_meta_device_tell_the_shape_of_the_loss(reduction: str) -> None:
    x, weight = torch.empty(7, 5, device="meta"), torch.empty(11, 5, device="meta")
    targets = torch.empty(7, dtype=torch.long, device="meta")
    loss = chunked_cross_entropy(x, weight, None, targets, reduction=reduction)  # type: ignore[arg-type]
    assert loss.is_meta and loss.dtype == torch.float32
    assert loss.shape == ((7,) if reduction == "none" else ())


def test_autocast_leaves_float64_as_it_leaves_a_linear_layer_of_float64() -> None:
    x, weight, bias, targets = inputs(0, 9, 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chunked_cross_entropy(x, weight, bias, targets)
    assert torch.equal(found, chunked_cross_entropy(x, weight, bias, targets))


def test_autocast_multiplies_in_bfloat16_and_leaves_float32_gradients() -> None:
    x, weight, bias, targets = inputs(5, 32, 20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(x, weight, bias, targets, chunk=5)
    rounded = chunked_cross_entropy(x.bfloat16(), weight.bfloat16(), bias, targets, chunk=5)
    torch.testing.assert_close(loss, rounded)
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)],
)
def test_a_vocabulary_filled_up_on_a_gpu_gives_the_plain_loss(
    dtype: torch.dtype, tolerance: float
) -> None:
    *layer, targets = (t.detach().cuda() for t in inputs(9, 300, 1003, dim=64))
    exact = [leaf.mul(0.3).to(dtype).double().requires_grad_() for leaf in layer]
    given = [leaf.detach().to(dtype).requires_grad_() for leaf in exact]
    plain = F.cross_entropy(F.linear(*exact), targets)
    loss = chunked_cross_entropy(*given, targets, chunk=64)
    assert loss.item() == pytest.approx(plain.item(), rel=tolerance)
    for found, expected in zip(
        torch.autograd.grad(loss, given), torch.autograd.grad(plain, exact), strict=True
    ):
        assert ((found.double() - expected).norm() / expected.norm()).item() < tolerance


def test_the_logits_of_all_tokens_never_exist_at_once() -> None:
    num_tokens, num_words = 96, 1000
    x, weight, bias, targets = inputs(6, num_tokens, num_words)
    with LargestTensor() as plain:
        F.cross_entropy(F.linear(x, weight, bias), targets).backward()
    assert plain.numel == num_tokens * num_words
    with LargestTensor() as chunked:
        chunked_cross_entropy(x, weight, bias, targets, chunk=16).backward()
    assert chunked.numel == 16 * num_words  # one chunk's logits; the joined weight has 13 * 1000


def test_the_default_chunk_holds_the_paper_s_vocabulary_to_four_million_logits() -> None:
    num_words = 267_735
    x, weight, bias, targets = inputs(7, 40, num_words, dim=2, dtype=torch.float32)
    with LargestTensor() as chunked, torch.no_grad():
        chunked_cross_entropy(x, weight, bias, targets)
    assert chunked.numel == 15 * num_words  # 2**22 // 267,735 = 15 tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk=0"),
        ({"reduction": "avg"}, "reduction='avg'"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets have shape \\(3,\\)"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str) -> None:
    x, weight, bias, targets = inputs(8, 4, 5)
    arguments: dict[str, object] = {"targets": targets, **change}
    with pytest.raises(UserError, match=message):
        chunked_cross_entropy(x, weight, bias, **arguments)  # type: ignore[arg-type]
