"""Rows of unit length: x / |x|, with a bounded gradient near zero and none at zero."""

import pytest
import torch

from acmoe import CosineConfig, MoE, RoutingState, SMoEConfig, SoftMoE
from acmoe.ops.unit import unit_rows


def test_rows_are_divided_by_their_length_and_zeros_stay():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -1e-5]], requires_grad=True)
    unit = unit_rows(x)
    torch.testing.assert_close(unit, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]]))
    # d(x1 / |x|) = (1 / |x|) (1 - u1^2, -u1 u2) = ((1 - 0.36) / 5, -0.48 / 5)
    (gradient,) = torch.autograd.grad(unit[:, 0].sum(), x)
    wanted = torch.tensor([[0.128, -0.096], [0.0, 0.0], [1e5, 0.0]])
    torch.testing.assert_close(gradient, wanted)


def test_shorter_rows_than_a_millionth_have_the_gradient_of_a_millionth():
    x = torch.tensor([[1e-9, 0.0], [1e-30, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(unit_rows(x).sum(), x)
    torch.testing.assert_close(gradient[0], torch.tensor([1e6, 1e6]))
    assert gradient.abs().max() <= 1.001e6


def test_second_derivatives_are_finite_with_a_row_of_zeros(generator):
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    x[1] = 0
    x.requires_grad_()
    other = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    (first,) = torch.autograd.grad((unit_rows(x) * other).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all() and (second[1] == 0).all() and (second[0] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["cosine", "soft", "unit embeddings"])
def test_a_token_of_zeros_has_a_bounded_gradient(kind, dtype, generator):
    torch.manual_seed(0)
    if kind == "soft":
        moe = SoftMoE(dim=8, hidden=8, num_experts=4)
    else:
        config = CosineConfig() if kind == "cosine" else SMoEConfig(normalize_embeddings=True)
        moe = MoE(dim=8, hidden=8, num_experts=4, top_k=2, router=config)
    moe = moe.to(dtype)
    x = torch.randn(6, 8, generator=generator).to(dtype)
    x[2] = 0
    x.requires_grad_()
    y, state = moe(x, RoutingState.identity(num_tokens=6, num_clusters=4, dim=8))
    (y.float().sum() + state.aux_loss).backward()
    assert x.grad.isfinite().all() and x.grad.abs().max() < 100
    for parameter in moe.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
