"""Run every check, in the order of the paper."""

from collections.abc import Callable

from acmoe.data.progress import Progress, silent
from acmoe.errors import check
from acmoe.lab.theory.check import Check
from acmoe.lab.theory.conditioning.convergence import (
    check_constant_gate,
    check_rotated,
    check_separated,
    check_varying_gate,
)
from acmoe.lab.theory.conditioning.draws import check_conditioning_draws
from acmoe.lab.theory.conditioning.eigenvalues import check_eigenvalue_lemma, check_eigenvalue_order
from acmoe.lab.theory.repeats.confirmation import check_confirmation, check_confirmation_scope
from acmoe.lab.theory.repeats.observed import check_repeated
from acmoe.lab.theory.robustness.assigned import check_assigned_cluster
from acmoe.lab.theory.robustness.dot_product import (
    check_distance,
    check_dot_product,
    check_overlapping_embeddings,
)
from acmoe.lab.theory.robustness.hypotheses import check_correlated, check_three_clusters
from acmoe.lab.theory.robustness.margins import check_without_noise
from acmoe.lab.theory.robustness.misassignment import check_misassignment, check_misassignment_scope
from acmoe.lab.theory.robustness.noise import (
    check_clean_scale,
    check_contaminated_share,
    check_noisy_scale,
)
from acmoe.lab.theory.robustness.noise_sweep import check_noise_sweep
from acmoe.lab.theory.robustness.rates import check_exponential
from acmoe.lab.theory.robustness.separation import check_separation, check_separation_fails
from acmoe.lab.theory.weights.harmonic import check_harmonic_mean
from acmoe.lab.theory.weights.optimum import check_kkt, check_optimiser
from acmoe.lab.theory.weights.roots import check_distinct_roots, check_tied_roots

CHECKS: tuple[Callable[[int], Check], ...] = (
    check_kkt,
    check_optimiser,
    check_harmonic_mean,
    check_distinct_roots,
    check_tied_roots,
    check_separation,
    check_separation_fails,
    check_misassignment,
    check_misassignment_scope,
    check_exponential,
    check_dot_product,
    check_distance,
    check_without_noise,
    check_correlated,
    check_three_clusters,
    check_noisy_scale,
    check_clean_scale,
    check_contaminated_share,
    check_noise_sweep,
    check_assigned_cluster,
    check_overlapping_embeddings,
    check_confirmation,
    check_confirmation_scope,
    check_repeated,
    check_constant_gate,
    check_varying_gate,
    check_rotated,
    check_separated,
    check_conditioning_draws,
    check_eigenvalue_lemma,
    check_eigenvalue_order,
)


def run_checks(*, seed: int = 0, progress: Progress = silent) -> list[Check]:
    """Run all checks; equal seeds give equal numbers. It takes some ten seconds on one core."""
    check(0 <= seed < 2**63, f"seed={seed}; use an integer from 0 to 2**63 - 1")
    found = []
    for done, verify in enumerate(CHECKS):
        progress("checking the paper's statements", done, len(CHECKS))
        found.append(verify(seed))
    progress("checking the paper's statements", len(CHECKS), len(CHECKS))
    return found
