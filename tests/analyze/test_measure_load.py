"""Load, dead experts and entropies, by hand."""

import math

import pytest
import torch

from acmoe.analyze.measure.load import gate_entropy, measure_load, over_layers


def test_shares_spread_and_entropy_of_eight_choices_by_hand() -> None:
    # Rows at experts 0 to 3: 4, 2, 2, 0 of 8, so 50, 25, 25 and 0 percent about a mean of 25:
    # sqrt((25^2 + 0 + 0 + 25^2) / 4) = 17.678. Bits: 1/2 * 1 + 2 * 1/4 * 2 = 1.5.
    found = measure_load(torch.tensor([[0, 1], [0, 2], [0, 1], [2, 0]]), 4)
    assert found.share == (50, 25, 25, 0)
    assert found.std == pytest.approx(math.sqrt(312.5))
    assert found.entropy == pytest.approx(1.5)
    assert found.dead == (3,)
    assert found.starved == (3,)


def test_an_expert_below_a_tenth_of_the_even_share_starves_without_being_dead() -> None:
    # Two experts, even share 1/2, a tenth of it 1/20: 1 row of 41 is less, 3 of 43 is more.
    ids_N = torch.tensor([0] * 40 + [1])
    assert measure_load(ids_N[:, None], 2).starved == (1,)
    assert measure_load(ids_N[:, None], 2).dead == ()
    ids_N = torch.tensor([0] * 40 + [1] * 3)
    assert measure_load(ids_N[:, None], 2).starved == ()


def test_the_id_of_no_expert_counts_nowhere() -> None:
    found = measure_load(torch.tensor([[0, 2], [1, 2]]), 2)
    assert found.share == (50, 50)


def test_even_load_has_the_entropy_of_all_experts() -> None:
    found = measure_load(torch.arange(8)[:, None], 8)
    assert found.entropy == pytest.approx(3)
    assert found.std == 0


def test_gate_entropy_is_the_mean_over_tokens() -> None:
    # Undecided between four experts: 2 bits. Sure of one: 0 bits. Their mean is 1.
    affinity_NE = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0]])
    assert gate_entropy(affinity_NE) == pytest.approx(1)


def test_gate_entropy_of_one_to_three_by_hand() -> None:
    # softmax(0, log 3) = (1/4, 3/4): 1/4 * 2 + 3/4 * log2(4/3).
    affinity_NE = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)
    assert gate_entropy(affinity_NE) == pytest.approx(0.5 + 0.75 * math.log2(4 / 3))


def test_the_spread_over_layers_by_hand() -> None:
    # Mean 3, deviations -2, 0, 2: sqrt(8 / 3).
    found = over_layers([1.0, 3.0, 5.0])
    assert (found.mean, found.least, found.greatest) == (3, 1, 5)
    assert found.std == pytest.approx(math.sqrt(8 / 3))
