"""Load balance by hand; instability against a loop over all pairs of tokens."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, rand_score

from acmoe.evaluate.measures import instability, load_balance


def table(first: list[int], second: list[int], size: int = 4) -> torch.Tensor:
    counts = torch.zeros(size, size, dtype=torch.int64)
    for one, two in zip(first, second, strict=True):
        counts[one, two] += 1
    return counts


def test_equal_loads_are_perfectly_balanced() -> None:
    assert load_balance(torch.tensor([7.0, 7.0, 7.0])) == 0


def test_one_expert_of_four_taking_everything_is_43_points() -> None:
    # Shares 100, 0, 0, 0: mean 25, deviations 75, 25, 25, 25, so sqrt((75^2 + 3 * 25^2) / 4).
    assert load_balance(torch.tensor([9.0, 0.0, 0.0, 0.0])) == pytest.approx(43.30127018922193)


def test_no_tokens_are_balanced() -> None:
    assert load_balance(torch.zeros(4)) == 0


def test_renaming_experts_is_no_instability() -> None:
    result = instability(table([0, 0, 1, 1, 2], [3, 3, 0, 0, 1]))
    assert result.instability == 0
    assert result.adjusted_rand == 1


def test_instability_of_four_tokens_by_hand() -> None:
    # {a b} {c d} becomes {a c} {b d}: ab and cd part, ac and bd meet, ad and bc stay apart.
    result = instability(table([0, 0, 1, 1], [0, 1, 0, 1]))
    assert result.instability == pytest.approx(4 / 6)
    # 2 of 6 pairs are together in each; by chance 2 * 2 / 6 in both, so (2 + 2 - 4 / 3) / 6.
    assert result.chance == pytest.approx((4 - 4 / 3) / 6)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=30))
def test_instability_is_the_share_of_pairs_that_part_or_meet(pairs: list[tuple[int, int]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    changed = [
        (first[i] == first[j]) != (second[i] == second[j])
        for i, j in itertools.combinations(range(len(pairs)), 2)
    ]
    result = instability(table(first, second))
    assert result.instability == pytest.approx(sum(changed) / len(changed))
    assert result.instability == pytest.approx(1 - rand_score(first, second))
    assert result.adjusted_rand == pytest.approx(adjusted_rand_score(first, second))


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=5),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_chance_is_the_mean_over_all_orders_of_the_second_clustering(
    first: list[int], second: list[int]
) -> None:
    second = second[: len(first)]
    found = [
        instability(table(first, list(order))).instability
        for order in itertools.permutations(second)
    ]
    expected = instability(table(first, second)).chance
    assert expected == pytest.approx(sum(found) / len(found))


def test_a_single_token_has_no_pair_to_disagree() -> None:
    assert instability(table([1], [2])) == (0.0, 0.0, 1.0)


def test_a_large_corpus_does_not_round() -> None:
    # 10^9 tokens at one expert, one elsewhere: 10^9 pairs of about 5 * 10^17 part.
    counts = torch.tensor([[10**9, 0], [0, 1]])
    assert instability(counts).instability == 0
    counts = torch.tensor([[10**9, 1], [0, 0]])
    pairs = (10**9 + 1) * 10**9 // 2
    assert instability(counts).instability == 10**9 / pairs
