"""T tokens, D features, C clusters and as many experts, E."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acmoe.lab.theory import votes as module
from acmoe.lab.theory.confirmation import CLUSTERS
from acmoe.lab.theory.votes import check_confirmation_scope, find, margins, mixtures

FEW = 8000


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 2**31), st.integers(2, 5), st.integers(1, 9))
def test_the_margin_in_the_metric_is_the_plain_one_plus_the_covariance(seed, experts, dim):
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(20, dim, generator=generator, dtype=torch.float64)
    embedding_ED = torch.randn(experts, dim, generator=generator, dtype=torch.float64)
    scale_CD = torch.rand(experts, dim, generator=generator, dtype=torch.float64) + 0.01
    scale_CD /= scale_CD.mean(-1, keepdim=True)
    assignment_T = torch.randint(experts, (20,), generator=generator)
    margin_TE, change_TE = margins(x_TD, embedding_ED, scale_CD, assignment_T)
    affinity_TE = (x_TD * scale_CD[assignment_T]) @ embedding_ED.T
    wanted_TE = affinity_TE.gather(1, assignment_T[:, None]) - affinity_TE
    torch.testing.assert_close(margin_TE + change_TE, wanted_TE)


def test_votes_from_loose_features_lower_the_margin_as_worked_out_by_hand():
    # h = (2, 1), e = (1, 0) and (0, 1): votes (2, -1), margin 1. With the scale (0.4, 1.6):
    # 0.8 - 1.6 = -0.8, so the covariance term is -1.8 = -0.6 * 2 + 0.6 * -1.
    x_TD, scale_CD = torch.tensor([[2.0, 1.0]]).double(), torch.tensor([[0.4, 1.6]]).double()
    margin_TE, change_TE = margins(x_TD, torch.eye(2).double(), scale_CD, torch.tensor([0]))
    assert margin_TE.tolist() == [[0.0, 1.0]]
    assert change_TE[0].tolist() == pytest.approx([0.0, -1.8])


@pytest.fixture(scope="module")
def drawn():
    return {m.name: m for m in mixtures(torch.Generator().manual_seed(0), FEW)}


@pytest.fixture(scope="module")
def found(drawn):
    return {name: find(mixture) for name, mixture in drawn.items()}


def test_mixtures_share_their_means_and_differ_in_where_they_are_tight(drawn):
    for name, mixture in drawn.items():
        assert torch.pdist(mixture.embedding).tolist() == pytest.approx([3.0] * 6), name
        own_T = mixture.cluster == 0
        mean_D, std_D = mixture.x[own_T].mean(0), mixture.x[own_T].std(0)
        torch.testing.assert_close(mean_D, mixture.embedding[0], atol=0.1, rtol=0)
        if mixture.std is not None:
            torch.testing.assert_close(std_D, mixture.std[0], atol=0.05, rtol=0.05)
    # Four blocks of four features: a cluster is tight on 4, on 4 others, on the 12 it is not on.
    tight = {n: (m.std[0] < 1).nonzero()[:, 0].tolist() for n, m in list(drawn.items())[:3]}
    assert tight["own block"] == [0, 1, 2, 3] and tight["other blocks"] == list(range(4, 16))
    assert len(tight["next block"]) == 4 and min(tight["next block"]) >= 4


def test_wrong_choices_are_repeated_only_where_the_votes_are_tight(found):
    assert found["own block"].repeated_wrong == found["own block"].repeated_right == 1
    assert found["next block"].repeated_wrong < 0.6 and found["other blocks"].repeated_wrong < 0.6


def test_leaving_helps_when_another_experts_features_are_tight_and_harms_when_own_are_loose(found):
    assert found["next block"].adaptive_rate < 0.85 * found["next block"].plain_rate
    assert found["other blocks"].adaptive_rate > 3 * found["other blocks"].plain_rate


def test_own_metrics_help_in_every_mixture_but_the_rotated(found):
    for name in ("own block", "next block", "other blocks"):
        assert found[name].own_metric_rate < 0.1 * found[name].plain_rate
    rotated = found["own block rotated"]
    assert rotated.own_metric_rate > 0.9 * rotated.plain_rate
    assert rotated.log_scale_rms < 0.2 < 0.5 < found["own block"].log_scale_rms


def test_the_row_is_confirmed_and_says_where_it_ends():
    row = check_confirmation_scope(0)
    assert row.confirmed and row.holds_as_printed is None and row.verdict.startswith("ends")
    assert row.figures["explained_by_covariance"] == 1
    assert row.figures["own_block_repeated_wrong"] == 1
    assert CLUSTERS.contrast == 8 and row == check_confirmation_scope(0)


def test_a_router_that_ignores_the_scale_is_not_confirmed(monkeypatch):
    def plain(x_TD, embedding_ED, scale_CD, assignment_T):
        return (x_TD @ embedding_ED.T).argmax(-1)

    monkeypatch.setattr(module, "adaptive_choice", plain)
    row = check_confirmation_scope(0)
    assert not row.confirmed and row.verdict.startswith("not confirmed")
