"""The softmax of narrow rows: numbers of a loop, gradients, and which calls are transposed."""

import math

import pytest
import torch
from torch import Tensor

from acmoe.ops import softmax
from acmoe.ops.softmax import FEW_ROWS, row_softmax


@pytest.fixture(params=[0, 32, 64], ids=["rows", "AVX2", "AVX-512"])
def register(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(softmax, "_register_bytes", lambda: request.param)
    return int(request.param)


def loop(x_TE: Tensor) -> list[list[float]]:
    """Each row by itself, in plain Python."""
    found = []
    for row in x_TE.tolist():
        powers = [math.exp(number) for number in row]
        found.append([power / math.fsum(powers) for power in powers])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_sums_to_one_as_in_a_loop(
    dtype: torch.dtype, register: int, generator: torch.Generator
) -> None:
    x_TE = torch.randn(FEW_ROWS, 7, generator=generator).to(dtype)
    wanted = torch.tensor(loop(x_TE), dtype=torch.float64)
    close = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(row_softmax(x_TE).double(), wanted, rtol=close, atol=0)


@pytest.mark.parametrize(
    ("rows", "columns", "transposed"),
    [
        (FEW_ROWS, 15, True),  # 60 bytes of float32, fewer than 64
        (FEW_ROWS, 16, False),
        (FEW_ROWS - 1, 2, False),
    ],
)
def test_narrow_rows_are_transposed_if_they_are_many(
    rows: int, columns: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "_register_bytes", lambda: 64)
    found = row_softmax(torch.zeros(rows, columns))
    assert found.stride() == ((1, rows) if transposed else (columns, 1))


def test_first_and_second_derivatives(register: int, generator: torch.Generator) -> None:
    x_TE = torch.randn(FEW_ROWS, 3, dtype=torch.float64, generator=generator).requires_grad_()
    weight_TE = torch.randn(FEW_ROWS, 3, dtype=torch.float64, generator=generator)

    def derivatives(y_TE: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad((y_TE * weight_TE).sum(), x_TE, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x_TE)
        return [first, second]

    wanted = derivatives(x_TE.exp() / x_TE.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(derivatives(row_softmax(x_TE)), wanted)


def test_a_row_of_nan_changes_no_other(register: int) -> None:
    x_TE = torch.zeros(FEW_ROWS, 2)
    x_TE[3, 1] = math.nan
    found = row_softmax(x_TE)
    assert found[3].isnan().all()
    assert torch.equal(found[4:], torch.full((FEW_ROWS - 4, 2), 0.5))


def test_a_transform_sees_the_same_numbers(register: int, generator: torch.Generator) -> None:
    x_BTE = torch.randn(2, FEW_ROWS, 2, generator=generator)
    wanted = torch.stack([row_softmax(x_TE) for x_TE in x_BTE])
    assert torch.equal(torch.vmap(row_softmax)(x_BTE), wanted)
