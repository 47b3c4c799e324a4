"""Huge rows are shrunk to 2^32 and keep their direction; no bit of another row changes."""

import math

import pytest
import torch

from acmoe.ops import bounded as bounded_module
from acmoe.ops.bounded import bounded
from acmoe.ops.route.tokens import ScaledTokens


def test_rows_up_to_the_bound_keep_every_bit() -> None:
    x_TD = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    x_TD = x_TD * torch.logspace(-44, 9, 50)[:, None]
    x_TD[0], x_TD[1, 0], x_TD[2] = 0.0, -0.0, 2.0**32
    assert torch.equal(bounded(x_TD).view(torch.int32), x_TD.view(torch.int32))


@pytest.mark.parametrize("size", [2.0**33, 1e19, 1e30, 3.4e38])
def test_a_huge_row_is_shrunk_to_the_bound(size: float) -> None:
    x_TD = torch.tensor([[size, -size / 2, 0.0], [1.0, 2.0, 3.0]])
    expected = torch.tensor([[2.0**32, -(2.0**31), 0.0], [1.0, 2.0, 3.0]])
    torch.testing.assert_close(bounded(x_TD), expected, rtol=1e-6, atol=0)


def test_few_tokens_are_rescaled_whatever_other_clusters_hold() -> None:
    """With fewer tokens than clusters, only the tokens' own rows of the scale are read."""
    x_TD = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    scale_CD = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    assignment_T = torch.tensor([4, -1, 0])
    own_TD = torch.stack([scale_CD[4], torch.ones(4), scale_CD[0]])
    for other in (1.0, 2.0**40, math.nan):  # of clusters 1 to 3, which have no token
        scale_CD[1:4] = other
        found_TD = ScaledTokens(x_TD, scale_CD, assignment_T).dense()
        assert torch.equal(found_TD, x_TD * own_TD)
    scale_CD[4] = 2.0**40  # of the first token, which is shrunk to the bound
    found_TD = ScaledTokens(x_TD, scale_CD, assignment_T).dense()
    shrunk_D = x_TD[0] * (2.0**32 / x_TD[0].abs().max())
    torch.testing.assert_close(found_TD[0], shrunk_D, rtol=1e-6, atol=0)
    assert torch.equal(found_TD[1:], (x_TD * own_TD)[1:])


def test_few_tokens_read_as_many_rows_of_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    read, sum_of_squares = [], bounded_module._sum_of_squares
    monkeypatch.setattr(
        bounded_module, "_sum_of_squares", lambda x: read.append(len(x)) or sum_of_squares(x)
    )
    for tokens, rows in ((3, 3), (7, 5)):  # of 5 clusters
        read.clear()
        ids_T = torch.arange(tokens) % 5
        ScaledTokens(torch.ones(tokens, 4), torch.ones(5, 4), ids_T).dense()
        assert read == [tokens, rows]


def test_float64_has_its_own_bound() -> None:
    x_TD = torch.tensor([[1e70, 1.0], [1e300, 1e299]], dtype=torch.float64)
    expected = [[1e70, 1.0], [2.0**256, 2.0**256 / 10]]
    torch.testing.assert_close(
        bounded(x_TD), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_not_made_finite(bad: float) -> None:
    out_TD = bounded(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert out_TD[0].isnan().any() and out_TD[1].tolist() == [1.0, 2.0]


def test_the_gradient_is_that_of_a_constant_factor() -> None:
    x_TD = torch.tensor([[2.0**34, 1.0], [3.0, 4.0]], requires_grad=True)
    bounded(x_TD).sum().backward()
    assert x_TD.grad is not None and x_TD.grad.tolist() == [[0.25, 0.25], [1.0, 1.0]]
