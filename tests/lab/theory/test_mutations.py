"""Every row can turn red: with a wrong scale, or with a wrong version of what it checks instead."""

import pytest
import torch

from acmoe.lab.theory import scale as scale_module
from acmoe.lab.theory.conditioning import eigenvalues
from acmoe.lab.theory.robustness import misassignment
from acmoe.lab.theory.suite import CHECKS
from acmoe.lab.theory.weights import optimum, roots
from acmoe.ops.statistics.scale import cluster_scale
from slow_cases import mostly_slow

# These rows do not call the library's scale; the tests below break what they do call.
WITHOUT_SCALE = {
    "check_kkt": "weights of Theorem 1 for given dispersions",
    "check_optimiser": "the same weights, against an optimiser",
    "check_distinct_roots": "an equation in given dispersions",
    "check_tied_roots": "the same equation",
    "check_misassignment": "a formula for any metric; the metrics are drawn",
    "check_misassignment_scope": "the plain metric only",
    "check_eigenvalue_lemma": "eigenvalues and variances of a matrix, without M",
}
# Rows whose simulation takes long; the default run has the other rows of the same statement.
LONG = {
    "check_conditioning_draws",
    "check_confirmation_scope",
    "check_noise_sweep",
    "check_repeated",
}
WITH_SCALE = [
    pytest.param(verify, marks=pytest.mark.slow) if verify.__name__ in LONG else verify
    for verify in CHECKS
    if verify.__name__ not in WITHOUT_SCALE
]


def inverted(x, assignment, num_clusters, **options):
    weight = 1 / cluster_scale(x, assignment, num_clusters, **options)
    return weight / weight.mean(-1, keepdim=True)


def random(x, assignment, num_clusters, **options):
    shape = cluster_scale(x, assignment, num_clusters, **options).shape
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (weight + 0.01) / (weight + 0.01).mean(-1, keepdim=True)


def test_rows_without_a_scale_are_rows_of_the_suite():
    assert WITHOUT_SCALE.keys() <= {verify.__name__ for verify in CHECKS}


@mostly_slow("wrong", [inverted, random])
@pytest.mark.parametrize("verify", WITH_SCALE)
def test_a_wrong_scale_turns_every_row_red_that_depends_on_it(verify, wrong, monkeypatch):
    monkeypatch.setattr(scale_module, "cluster_scale", wrong)
    row = verify(0)
    assert not row.confirmed and row.verdict.startswith("not confirmed")
    assert row.holds_as_printed is None  # a wrong library does not blame the paper


@pytest.mark.slow
@pytest.mark.parametrize("verify", [v for v in CHECKS if v.__name__ in WITHOUT_SCALE])
def test_the_other_rows_do_not_call_the_scale(verify, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the scale was measured")

    monkeypatch.setattr(scale_module, "cluster_scale", refuse)
    assert verify(0).confirmed


def off_by_a_billionth(s_XD, strength_X1):
    weights_XD = optimum.optimal_weights(s_XD, strength_X1)
    weights_XD[:, 0] *= 1 + 1e-9
    return weights_XD


def uniform(s_XD, strength_X1):
    return torch.full_like(s_XD, 1 / s_XD.shape[-1])


def variance_left_unstretched(gap_D, covariance_DD, scale_D):
    signal = (scale_D * gap_D.square()).sum()
    return torch.special.ndtr(-signal / (2 * (gap_D @ covariance_DD @ gap_D).sqrt()))


def twice_the_variance(gap_D, covariance_DD, scale_D):
    return misassignment.misassignment(gap_D, 2 * covariance_DD, scale_D)


def without_the_largest(s_D, strength):
    return roots.spectral_roots(s_D, strength)[:-1]


def unsquared(eigenvalues_XD, eigenvectors_XDD):
    ratio_X, eps_X = BOUND_RATIOS(eigenvalues_XD, eigenvectors_XDD)
    return ratio_X.sqrt(), eps_X


BOUND_RATIOS = eigenvalues.bound_ratios


@pytest.mark.parametrize(
    ("verify", "options", "patch"),
    [
        (optimum.check_kkt, {"weights_of": off_by_a_billionth}, None),
        (optimum.check_optimiser, {"weights_of": uniform}, None),
        (misassignment.check_misassignment, {"formula": variance_left_unstretched}, None),
        (misassignment.check_misassignment_scope, {"formula": twice_the_variance}, None),
        (roots.check_distinct_roots, {"draws": 2}, (roots, "real_roots", without_the_largest)),
        (roots.check_tied_roots, {"draws": 2}, (roots, "real_roots", without_the_largest)),
        (eigenvalues.check_eigenvalue_lemma, {}, (eigenvalues, "bound_ratios", unsquared)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_other_rows_turn_red_with_what_they_check(verify, options, patch, monkeypatch):
    if patch is not None:
        monkeypatch.setattr(*patch)
    row = verify(0, **options)
    assert not row.confirmed and row.verdict.startswith("not confirmed")
    assert row.holds_as_printed is None
