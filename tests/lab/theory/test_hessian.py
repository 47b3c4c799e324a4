"""X draws, T tokens, D features, E experts."""

import pytest
import torch

from acmoe.lab.theory.conditioning.hessian import (
    closed_form,
    condition_number,
    conditioning,
    expert_hessians,
    router_loss,
)

# Four tokens on the axes: mean square (1/2, 2), deviations (sqrt(1/2), sqrt(2)).
CROSS = torch.tensor([[[1.0, 0], [-1, 0], [0, 2], [0, -2]]], dtype=torch.float64)
CLUSTER = torch.zeros(1, 4, dtype=torch.int64)
ZERO = torch.zeros(1, 2, 2, dtype=torch.float64)


def test_with_two_silent_experts_the_hessian_is_a_quarter_of_the_second_moment():
    # g = 1/2, so g (1 - g) = 1/4 for every token.
    hessian_XDD = expert_hessians(CROSS, ZERO, CLUSTER, torch.tensor([0]))
    expected = torch.diag(torch.tensor([0.125, 0.5], dtype=torch.float64))
    torch.testing.assert_close(hessian_XDD[0], expected)
    assert condition_number(hessian_XDD).item() == pytest.approx(4)


def test_the_scale_spheres_an_aligned_cluster():
    result = conditioning(CROSS, CLUSTER, ZERO, measure="std")
    assert result.plain.item() == pytest.approx(4)
    assert result.adaptive.item() == pytest.approx(1)
    assert result.frozen_gate_error == pytest.approx(0, abs=1e-12)


def test_autograd_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    embeddings_ED = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    cluster_T = torch.randint(4, (30,), generator=generator)
    expert = torch.tensor(2)
    hessian_DD = expert_hessians(x_TD[None], embeddings_ED[None], cluster_T[None], expert[None])[0]
    step_DD = 1e-3 * torch.eye(3, dtype=torch.float64)

    def loss(a, i, b, j):
        moved_D = embeddings_ED[2] + a * step_DD[i] + b * step_DD[j]
        return router_loss(moved_D, x_TD, embeddings_ED, cluster_T, expert).item()

    for i in range(3):
        for j in range(3):
            corners = loss(1, i, 1, j) - loss(1, i, -1, j) - loss(-1, i, 1, j) + loss(-1, i, -1, j)
            assert hessian_DD[i, j].item() == pytest.approx(corners / 4e-6, abs=1e-6)


def test_taking_the_gate_out_of_the_mean_changes_the_hessian():
    generator = torch.Generator().manual_seed(0)
    x_XTD = torch.randn(1, 50, 3, generator=generator, dtype=torch.float64)
    embeddings_XED = 2 * torch.randn(1, 4, 3, generator=generator, dtype=torch.float64)
    expert_X = torch.tensor([1])
    cluster_XT = torch.randint(4, (1, 50), generator=generator)
    hessian = expert_hessians(x_XTD, embeddings_XED, cluster_XT, expert_X)
    exact = closed_form(x_XTD, embeddings_XED, expert_X, frozen_gate=False)
    proof = closed_form(x_XTD, embeddings_XED, expert_X, frozen_gate=True)
    torch.testing.assert_close(hessian, exact)
    assert (hessian - proof).norm() > 0.1 * hessian.norm()
