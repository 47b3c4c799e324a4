"""The counterexample to Proposition 1 for the rule it is stated for, by independent means."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from acmoe.lab.theory.robustness import dot_product as module
from acmoe.lab.theory.robustness.dot_product import (
    MEANS,
    STD,
    check_distance,
    check_dot_product,
    check_overlapping_embeddings,
    errors,
    repeat_rates,
)
from acmoe.lab.theory.scale import exact_scale

SCALE = np.array([1.6, 0.4])


def test_the_embeddings_have_equal_lengths_and_the_scale_is_the_one_by_hand():
    assert MEANS.square().sum(-1).tolist() == pytest.approx([4.25, 4.25])
    assert exact_scale(STD).tolist() == pytest.approx(SCALE.tolist())


def test_the_errors_are_those_worked_out_by_hand():
    found = errors(exact_scale(STD))
    assert found["plain"] == pytest.approx([0.087, 0.087], abs=5e-4)
    assert found["dot product"] == pytest.approx([0.586, 0.0], abs=5e-4)
    assert sum(found["dot product"]) / 2 == pytest.approx(0.293, abs=5e-4)
    # -0.16 / sqrt(0.544) and 3.712 / (2 sqrt(0.544))
    assert found["dot product"][0] == pytest.approx(norm.sf(-0.16 / 0.544**0.5), rel=1e-12)
    assert found["distance"] == pytest.approx([norm.sf(1.856 / 0.544**0.5)] * 2, rel=1e-12)


def test_repeat_rates_are_those_of_two_correlated_normals():
    mu, sd = MEANS.numpy(), STD.numpy()
    gap = mu[0] - mu[1]
    normals = np.stack([gap, SCALE * gap])
    covariance = (normals * sd**2) @ normals.T
    wrong = right = total_wrong = 0.0
    for cluster, sign in ((0, 1.0), (1, -1.0)):
        mean = sign * normals @ mu[cluster]  # both rules positive: right
        wrong += multivariate_normal(mean, covariance).cdf([0, 0])
        right += multivariate_normal(-mean, covariance).cdf([0, 0])
        total_wrong += norm.cdf(-mean[0] / covariance[0, 0] ** 0.5)
    found = repeat_rates(exact_scale(STD))
    assert found == pytest.approx((wrong / total_wrong, right / (2 - total_wrong)), abs=1e-6)


def test_the_paper_is_contradicted_and_the_variant_proved():
    rows = [check(0) for check in (check_dot_product, check_distance, check_overlapping_embeddings)]
    assert all(row.confirmed for row in rows)
    assert [row.holds_as_printed for row in rows] == [False, None, None]
    assert rows[0].figures["lemma_1_gain"] == pytest.approx(3.712 / 3.4)
    assert rows[2].figures["measured_repeated_when_right"] == pytest.approx(0.89, abs=0.02)


@pytest.mark.parametrize("name", ["adaptive_choice", "distance_choice"])
def test_a_router_that_forgets_the_scale_or_the_bias_is_not_confirmed(name, monkeypatch):
    def plain(x_TD, embedding_ED, scale_CD, assignment_T):
        return (x_TD @ embedding_ED.T).argmax(-1)

    def dot_product(x_TD, embedding_ED, scale_CD, assignment_T):
        return ((x_TD * scale_CD[assignment_T]) @ embedding_ED.T).argmax(-1)

    wrong = {"adaptive_choice": plain, "distance_choice": dot_product}[name]
    monkeypatch.setattr(module, name, wrong)
    row = {"adaptive_choice": check_dot_product, "distance_choice": check_distance}[name](0)
    assert not row.confirmed
