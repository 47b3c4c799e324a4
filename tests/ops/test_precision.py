"""Under autocast expert products go down to 16 bits, and statistics do not.

N rows, T tokens, D features, E experts.
"""

import pytest
import torch

from acmoe.ops.experts.grouped import grouped_linear
from acmoe.ops.precision import autocast_dtype, without_autocast
from acmoe.ops.statistics.dispersion import dispersion
from acmoe.ops.statistics.scale import cluster_scale
from cases import MEASURES


@pytest.mark.parametrize("measure", MEASURES)
def test_autocast_changes_no_bit_of_the_statistics(
    measure: str, generator: torch.Generator
) -> None:
    x_TD = 10 + torch.randn(50, 4, generator=generator)
    assignment_T = torch.arange(50) % 3
    plain = dispersion(x_TD, assignment_T, 3, measure=measure)
    scale = cluster_scale(x_TD, assignment_T, 3, measure=measure, strength=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dispersion(x_TD, assignment_T, 3, measure=measure), plain)
        again = cluster_scale(x_TD, assignment_T, 3, measure=measure, strength=0.5)
    assert torch.equal(again, scale)


def test_autocast_lowers_expert_products_as_it_does_linear_layers(
    generator: torch.Generator,
) -> None:
    x_ND = torch.randn(6, 4, generator=generator, requires_grad=True)
    weight_EDD = torch.randn(1, 4, 4, generator=generator, requires_grad=True)
    end_E = torch.tensor([6])
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_linear(x_ND, weight_EDD, end_E)
        expected = torch.nn.functional.linear(x_ND, weight_EDD[0])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    # Gradients arrive in the dtype of what they belong to.
    for gradient in torch.autograd.grad(found.sum(), [x_ND, weight_EDD]):
        assert gradient.dtype == torch.float32


def test_a_hidden_layer_already_lowered_meets_float32_weights(generator: torch.Generator) -> None:
    hidden_ND = torch.randn(6, 4, generator=generator).bfloat16()
    weight_EDD = torch.randn(2, 4, 4, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_linear(hidden_ND, weight_EDD, torch.tensor([2, 6])).dtype == torch.bfloat16


def test_autocast_leaves_float64_alone() -> None:
    x = torch.ones(2, 2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(x) is None
        assert autocast_dtype(x.float()) == torch.bfloat16
    assert autocast_dtype(x.float()) is None


def test_inside_without_autocast_products_stay_float32() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_tensors_without_memory_have_no_autocast() -> None:
    x_TD = torch.empty(5, 3, device="meta")
    assignment_T = torch.empty(5, dtype=torch.long, device="meta")
    assert dispersion(x_TD, assignment_T, 4).shape == (4, 3)
    assert autocast_dtype(x_TD) is None
