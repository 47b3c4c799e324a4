"""Activations and dropout of the expert kernels: accuracy, and the randomness of the keep mask.

T tokens, one expert, so that row t of the kernels is token t; F hidden units.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from acmoe.ops.experts import ExpertWeights
from acmoe.ops.experts.autograd import fused_expert_mlp
from acmoe.ops.sort import sort_rows

HIDDEN = 16


def activated(h_T: Tensor, activation: str, *, units: int = HIDDEN, dropout: float = 0.0) -> Tensor:
    """(T, F): the activation of h in every unit, by experts whose weights are ones and identity."""
    tokens, device = h_T.numel(), h_T.device
    x_TD = torch.nn.functional.pad(h_T[:, None], (0, units - 1))
    up = torch.zeros(1, units, units, device=device)
    up[:, :, 0] = 1.0
    down = torch.eye(units, device=device)[None]
    gate = torch.ones(tokens, 1, device=device)
    order = sort_rows(torch.zeros(tokens, 1, dtype=torch.int64, device=device), 1)
    return fused_expert_mlp(
        *(x_TD, ExpertWeights(up, down, None, None), order, gate),
        activation=activation,
        dropout=dropout,
    )


def test_gelu_is_exact_to_float32_rounding_of_its_argument(device):
    h = torch.linspace(-8, 8, 257, device=device, requires_grad=True)
    found = activated(h, "gelu")[:, 3]
    wide = h.detach().double().requires_grad_()
    right = torch.nn.functional.gelu(wide)
    # The fit is off by 1.3e-7; a float32 number rounds by 2^-24 of itself, here a few times.
    assert ((found - right).abs() <= 2e-7 + 2**-22 * wide.abs()).all()
    (slope,) = torch.autograd.grad(found.sum(), [h])
    (right_slope,) = torch.autograd.grad(right.sum(), [wide])
    torch.testing.assert_close(slope.double(), right_slope, rtol=0, atol=5e-6)


def test_gelu_keeps_its_relative_accuracy_in_the_negative_tail(device):
    """Down to -4, where its value is -1.3e-4: a twentieth of a bf16 number's last place."""
    h = torch.linspace(-4, -0.01, 160, device=device)
    right = torch.nn.functional.gelu(h.double())
    assert ((activated(h, "gelu")[:, 0] - right) / right).abs().max() < 2**-12


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_what_is_no_number_stays_none(activation, device):
    found = activated(torch.tensor([1.0, float("nan"), 2.0], device=device), activation)
    assert found.isnan().all(1).tolist() == [False, True, False]


def mixed(bits):
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> np.uint32(16))


def kept(seed: int, rows: int, columns: int, dropout: float):
    """The units that dropout keeps, by numpy."""
    places = [np.arange(1, n + 1, dtype=np.uint32) * np.uint32(0x9E3779B1) for n in (rows, columns)]
    start = mixed(np.array([seed], dtype=np.uint32) + np.uint32(0x9E3779B9))
    row = mixed(mixed(places[0]) ^ start)[:, None]
    drawn = (row ^ mixed(places[1])[None, :]) * (row | np.uint32(1))
    return drawn >= np.uint32(round(dropout * 2**32))


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_the_kernels_drop_the_units_of_the_hash(dropout, device):
    units = 32
    torch.manual_seed(3)
    seed = torch.randint(2**31, (1,), device=device).item()
    torch.manual_seed(3)
    found = activated(torch.ones(50, device=device), "relu", units=units, dropout=dropout)
    right = torch.from_numpy(kept(seed, 50, units, dropout)).to(found) / (1 - dropout)
    torch.testing.assert_close(found, right)


def standard(seed: int, rows: int, columns: int, dropout: float):
    """The keep mask, shifted and scaled to mean 0 and variance 1."""
    mask = kept(seed, rows, columns, dropout).astype(np.float32)
    return (mask - (1 - dropout)) / np.sqrt(dropout * (1 - dropout))


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_no_row_and_no_column_has_an_odd_share(dropout):
    """Sums of n independent draws are normal with variance n: of 2,560 none is 5.5 sigma off."""
    mask = standard(11, 2048, 512, dropout)
    for axis in (0, 1):
        share = mask.sum(axis) / np.sqrt(mask.shape[axis])
        assert np.abs(share).max() < 5.5
        assert share.var() == pytest.approx(1.0, abs=5 * np.sqrt(2 / share.size))
    assert abs(mask.sum()) < 4 * np.sqrt(mask.size)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_no_two_rows_and_no_two_columns_fall_together(dropout):
    """Products of 512 or 2,048 independent draws: of 130,816 pairs none is 7.5 sigma off.

    (Skewed draws have heavier tails than normal ones: sums of 512 products reach 6 at p = 0.1.)
    With one factor for all rows, (row ^ column) * constant, some pairs are 17 to 70 sigma off.
    """
    mask = standard(12, 2048, 512, dropout)
    for table in (mask[:512], mask.T):
        pairs = (table @ table.T)[np.triu_indices(512, 1)] / np.sqrt(table.shape[1])
        assert np.abs(pairs).max() < 7.5
        assert pairs.var() == pytest.approx(1.0, abs=0.05)


def test_draws_of_neighbouring_seeds_are_independent():
    """Sums of 2^20 products of draws: normal, so none of 12 is 5 sigma off; rows may be shifted."""
    first = standard(100, 2048, 512, 0.25)
    for seed in (101, 102, 100 + 2**16, 2**31 - 1):
        other = standard(seed, 2048, 512, 0.25)
        for shift in (0, 1, 2):
            total = (first * np.roll(other, shift, axis=0)).sum()
            assert abs(total) < 5 * np.sqrt(first.size)
