"""Rescaled tokens by kernel: sizes, clusters and gradients at their limits."""

import math

import pytest
import torch

from acmoe.ops.route.rescaled import MOST_FEATURES, rescaled_tokens

pytest.importorskip("triton")

run = rescaled_tokens.kernels[0].run
reference = rescaled_tokens.definition


def test_the_kernel_is_the_first_of_the_op() -> None:
    assert rescaled_tokens.kernels[0].name == "triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (2, 3, 130), (3, MOST_FEATURES)])
def test_results_and_gradients_have_the_bits_of_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    tokens, features = x.numel() // shape[-1], shape[-1]
    scale = (torch.rand(4, features, generator=generator) + 0.1).to(device)
    assignment = torch.randint(-1, 4, (tokens,), generator=generator).to(device)
    cotangent = torch.randn(shape, generator=generator).to(device)
    for args in ((x, scale, assignment), (x, None, None)):
        found, wanted = run(*args), reference(*args)
        assert found.dtype == torch.float32 and torch.equal(found, wanted)
        grads = [torch.autograd.grad(y, x, cotangent)[0] for y in (found, wanted)]
        # The interpreter truncates bf16 where a GPU rounds.
        rtol = 0.0 if dtype == torch.float32 or device == "cuda" else 2**-7
        torch.testing.assert_close(*grads, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_read_tokens_that_are_rounded_to_their_dtype(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    x = torch.randn(9, 33, generator=generator).to(device, dtype).requires_grad_()
    scale = (torch.rand(4, 33, generator=generator) + 0.1).to(device)
    assignment = torch.randint(-1, 4, (9,), generator=generator).to(device)
    cotangent = torch.randn(9, 33, generator=generator).to(device, dtype)
    found, wanted = (one(x, scale, assignment, dtype) for one in (run, reference))
    assert found.dtype == dtype
    # The interpreter truncates bf16 where a GPU rounds.
    exact = dtype == torch.float16 or device == "cuda"
    rtol = 0.0 if exact else 2**-7
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=0.0)
    grads = [torch.autograd.grad(y, x, cotangent)[0] for y in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=rtol, atol=0.0)


def test_huge_rows_are_shrunk_and_so_are_their_gradients(device: str) -> None:
    # 2^33 is shrunk to 2^32, and the product with 4 again; 2^31 * 4 is shrunk once; 3 is not.
    x = torch.tensor([[2.0**33, 2.0], [2.0**31, 1.0], [3.0, 1.0]], device=device).requires_grad_()
    scale = torch.tensor([[4.0, 4.0]], device=device)
    y = run(x, scale, torch.zeros(3, dtype=torch.int64, device=device))
    assert y.tolist() == [[2.0**32, 1.0], [2.0**32, 2.0], [12.0, 4.0]]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.tolist() == [[0.5, 0.5], [2.0, 2.0], [4.0, 4.0]]


def test_a_row_with_nan_is_nan_and_no_other_is(generator: torch.Generator, device: str) -> None:
    x = torch.randn(3, 20, generator=generator).to(device)
    x[1, 4] = math.nan
    found = run(x, torch.ones(1, 20, device=device), torch.zeros(3, device=device).long())
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], x[[0, 2]])


def test_a_gradient_is_differentiated_in_turn(generator: torch.Generator, device: str) -> None:
    x = torch.randn(5, 6, generator=generator).to(device).requires_grad_()
    scale = (torch.rand(2, 6, generator=generator) + 0.5).to(device)
    assignment = torch.tensor([0, 1, -1, 1, 0], device=device)
    # The sum of (x s)^3: its gradient is 3 x^2 s^3, whose sum has the gradient 6 x s^3.
    (grad,) = torch.autograd.grad(run(x, scale, assignment).pow(3).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(grad.sum(), x)
    own = torch.where((assignment < 0)[:, None], 1.0, scale[assignment])
    torch.testing.assert_close(twice, 6 * x.detach() * own.pow(3), rtol=1e-5, atol=1e-6)


def test_gradients_of_a_batch_are_those_of_each(generator: torch.Generator, device: str) -> None:
    x = torch.randn(5, 6, generator=generator).to(device).requires_grad_()
    scale = (torch.rand(2, 6, generator=generator) + 0.5).to(device)
    y = run(x, scale, torch.tensor([0, 1, -1, 1, 0], device=device))
    cotangents = torch.randn(3, 5, 6, generator=generator).to(device)
    (batch,) = torch.autograd.grad(y, x, cotangents, is_grads_batched=True, retain_graph=True)
    for one, cotangent in zip(batch, cotangents, strict=True):
        (wanted,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
        torch.testing.assert_close(one, wanted)


def test_profilers_do_not_choose_another_kernel(device: str) -> None:
    x = torch.ones(2, 4, device=device)
    with torch.profiler.profile(acc_events=True):  # without it, torch 2.11 warns once
        assert rescaled_tokens.reasons(x, None, None)["triton"] is None


def test_a_learned_scale_and_long_rows_run_the_definition(device: str) -> None:
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    learned = torch.ones(1, 4, device=device, requires_grad=True)
    x, long = torch.ones(2, 4, device=device), torch.ones(2, MOST_FEATURES + 1, device=device)
    reasons = (
        rescaled_tokens.reasons(x, learned, ids)["triton"],
        rescaled_tokens.reasons(long, None, None)["triton"],
    )
    assert "no gradient for the scale" in str(reasons[0])
    assert f"up to {MOST_FEATURES} features" in str(reasons[1])
