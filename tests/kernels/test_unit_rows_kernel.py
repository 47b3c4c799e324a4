"""Rows of unit length by kernel: sizes, gradients, and rows at their limits."""

import math

import pytest
import torch

from acmoe.ops.unit import MOST_FEATURES, unit_rows

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

run = unit_rows.kernels[0].run


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (2, 3, 130), (3, 4000)])
def test_rows_and_gradients_are_the_definitions(
    shape: tuple[int, ...], generator: torch.Generator, device: str
) -> None:
    x = torch.randn(shape, generator=generator).to(device).requires_grad_()
    cotangent = torch.randn(shape, generator=generator).to(device)
    wide = x.detach().double().requires_grad_()
    found, wanted = run(x), unit_rows.definition(wide)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)
    (grad,) = torch.autograd.grad(found, x, cotangent)
    (wanted_grad,) = torch.autograd.grad(wanted, wide, cotangent.double())
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-5, atol=1e-6)


def test_zeros_short_rows_and_rows_that_are_not_finite(device: str) -> None:
    rows = [[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0], [1e-30, 0.0], [math.nan, 1.0], [math.inf, 1.0]]
    x = torch.tensor(rows, device=device).requires_grad_()
    found, wanted = run(x), unit_rows.definition(x)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found[1].tolist() == [0, 0] and found[4].isnan().all()
    grads = [torch.autograd.grad(y[:5, 0].sum(), x)[0] for y in (found, wanted)]
    torch.testing.assert_close(*grads, equal_nan=True)
    assert grads[0][0].tolist() == pytest.approx([0.128, -0.096], rel=1e-5)
    assert grads[0][1].tolist() == [0, 0] and grads[0][2].tolist() == pytest.approx([1e6, 0])


def test_a_gradient_is_differentiated_in_turn(generator: torch.Generator, device: str) -> None:
    x = torch.randn(3, 4, generator=generator).to(device).requires_grad_()
    other = torch.randn(3, 4, generator=generator).to(device)
    seconds = []
    for function in (run, unit_rows.definition):
        (first,) = torch.autograd.grad((function(x) * other).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)


def test_gradients_of_a_batch_are_computed_one_by_one(device: str) -> None:
    x = torch.tensor([[3.0, 4.0], [1.0, 0.0]], device=device).requires_grad_()
    batch = torch.eye(4, device=device).view(4, 2, 2)
    (found,) = torch.autograd.grad(run(x), x, batch, is_grads_batched=True)
    single = [torch.autograd.grad(run(x), x, one)[0] for one in batch]
    torch.testing.assert_close(found, torch.stack(single))


def test_what_the_kernel_cannot_serve(device: str) -> None:
    for x, reason in (
        (torch.ones(2, 3, dtype=torch.bfloat16, device=device), "float32 rows"),
        (torch.ones(0, 3, device=device), "no rows"),
        (torch.ones(1, MOST_FEATURES + 1, device=device), "features"),
    ):
        told = unit_rows.reasons(x)["triton"]
        assert told is not None and reason in told
    assert unit_rows.reasons(torch.ones(2, 3, device=device))["triton"] is None
