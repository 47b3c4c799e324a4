"""Overlap, moves and contingency tables, by hand and against loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, rand_score

from acmoe.analyze.measure.change import cluster_change, contingency, moved, overlap
from acmoe.errors import UserError


def test_overlap_by_hand() -> None:
    # Experts {0, 1} and {1, 0}: all stay. {0, 1} and {1, 2}: one of two. {0, 1}, {2, 3}: none.
    before_NK = torch.tensor([[0, 1], [0, 1], [0, 1]])
    after_NK = torch.tensor([[1, 0], [1, 2], [2, 3]])
    assert overlap(before_NK, after_NK, 4).tolist() == [1, 0.5, 0]


def test_the_id_of_no_expert_is_no_expert_two_routings_share() -> None:
    # With three experts, 3 means none. {0}, {0, 1}: one of two; {}, {}: agreed; {}, {2}: no.
    before_NK = torch.tensor([[0, 3], [3, 3], [3, 3]])
    after_NK = torch.tensor([[0, 1], [3, 3], [2, 3]])
    assert overlap(before_NK, after_NK, 3).tolist() == [0.5, 1, 0]


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_overlap_is_what_sets_say(seed: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pair = [torch.rand(9, 5, generator=generator).topk(top_k).indices for _ in range(2)]
    expected = [
        len(set(a) & set(b)) / top_k
        for a, b in zip(pair[0].tolist(), pair[1].tolist(), strict=True)
    ]
    assert overlap(pair[0], pair[1], 5).tolist() == pytest.approx(expected)


def test_overlap_refuses_other_tokens() -> None:
    with pytest.raises(UserError, match="2 and 3 tokens"):
        overlap(torch.zeros(2, 1).long(), torch.zeros(3, 1).long(), 4)


def test_moved_counts_other_first_choices() -> None:
    assert moved(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 3, 2])) == 0.5


def test_the_contingency_table_counts_pairs_of_clusters() -> None:
    table_CE = contingency(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]), 2)
    assert table_CE.tolist() == [[0, 2], [1, 0]]


@given(st.integers(0, 2**31))
def test_change_is_one_minus_the_rand_index_of_scikit_learn(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first_N, second_N = torch.randint(4, (2, 30), generator=generator)
    found = cluster_change(first_N, second_N, 4)
    assert found.instability == pytest.approx(1 - rand_score(first_N, second_N))
    assert found.adjusted_rand == pytest.approx(adjusted_rand_score(first_N, second_N))
