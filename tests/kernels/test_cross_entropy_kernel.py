"""The softmax and gradient of a chunk of logits, written over them."""

import pytest
import torch

from acmoe.ops.cross_entropy.op import chunked_cross_entropy
from acmoe.ops.dispatch import use_backend

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

N = 5


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "words", "pitch"),
    [
        (torch.float32, torch.bfloat16, 9001, 9001),  # three steps along a row, odd rows
        (torch.float32, torch.bfloat16, 300, 320),  # rows of a wider buffer
        (torch.float32, torch.float32, 7, 7),
        (torch.bfloat16, torch.bfloat16, 4097, 4097),
    ],
)
def test_logits_become_their_gradient(
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    words: int,
    pitch: int,
    generator: torch.Generator,
    device: str,
) -> None:
    from acmoe.ops.cross_entropy.triton.cross_entropy import gradient_view, softmax_gradient_

    buffer = (10 * torch.randn(N, pitch, generator=generator)).to(device, dtype)
    logits = buffer[:, :words]
    targets = torch.randint(0, words, (N,), generator=generator).to(device)
    share = torch.tensor([0.1, 0.5, 0.0, 0.2, 1.0], device=device)

    exact = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (wanted * share).sum().backward()
    assert exact.grad is not None
    beside = buffer[:, words:].clone()
    loss = softmax_gradient_(logits, targets, share, gradient_dtype)
    assert torch.allclose(loss.double(), wanted, rtol=1e-6, atol=1e-5)
    gradient = gradient_view(logits, gradient_dtype)
    assert gradient.shape == (N, words) and gradient.dtype == gradient_dtype
    # bf16 keeps 8 bits; the interpreter truncates where a GPU rounds.
    relative = torch.finfo(gradient_dtype).eps if gradient_dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(gradient.double(), exact.grad, rtol=relative, atol=1e-9)
    assert (gradient[2] == 0).all()  # a share of 0
    assert torch.equal(buffer[:, words:], beside)


def test_huge_and_impossible_words_are_no_trouble(device: str) -> None:
    from acmoe.ops.cross_entropy.triton.cross_entropy import softmax_gradient_

    inf = float("inf")
    logits = torch.tensor([[3e38, 0.0, -inf], [-inf, -inf, 2.0], [0.0, 0.0, -inf]], device=device)
    loss = softmax_gradient_(
        logits,
        torch.tensor([0, 2, 1], device=device),
        torch.ones(3, device=device),
        torch.float32,
    )
    assert loss.tolist() == pytest.approx([0, 0, 0.6931472])  # log 2
    assert logits.tolist() == [[0, 0, 0], [0, 0, 0], pytest.approx([0.5, -0.5, 0])]


def test_a_masked_row_may_hold_anything(device: str) -> None:
    from acmoe.ops.cross_entropy.triton.cross_entropy import softmax_gradient_

    logits = torch.full((1, 4), float("nan"), device=device)
    zero = torch.zeros(1, device=device)
    softmax_gradient_(logits, zero.long(), zero, torch.float32)
    assert (logits == 0).all()


def test_the_op_is_well_formed(generator: torch.Generator, device: str) -> None:
    from acmoe.ops.cross_entropy.triton.cross_entropy import softmax_gradient_

    logits = torch.randn(2, 5, generator=generator).to(device)
    targets = torch.tensor([0, 4], device=device)
    args = (logits, targets, torch.ones(2, device=device), torch.float32)
    torch.library.opcheck(softmax_gradient_, args, test_utils=("test_schema", "test_faketensor"))


def test_the_loss_takes_the_kernel_when_asked_and_agrees(
    generator: torch.Generator, device: str
) -> None:
    x, weight = (torch.randn(n, 8, generator=generator).to(device) for n in (11, 301))
    bias = torch.randn(301, generator=generator).to(device)
    targets = torch.randint(301, (11,), generator=generator).to(device)
    mask = torch.arange(11, device=device) % 3 != 0
    x[0] = float("nan")  # padding may hold anything
    found = []
    for backend in ("triton", "torch"):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        with use_backend(backend):
            loss = chunked_cross_entropy(*leaves, targets, chunk=4, token_mask=mask)
        found.append([loss.detach(), *torch.autograd.grad(2.0 * loss, leaves)])
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
