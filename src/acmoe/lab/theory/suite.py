"""Run every check, in the order of the paper."""

from collections.abc import Callable

from acmoe.errors import check
from acmoe.lab.theory.check import Check
from acmoe.lab.theory.confirmation import check_confirmation
from acmoe.lab.theory.convergence import check_aligned, check_rotated, check_separated
from acmoe.lab.theory.eigenvalues import check_eigenvalue_lemma
from acmoe.lab.theory.misassignment import check_misassignment, check_misassignment_scope
from acmoe.lab.theory.noise_sweep import check_noise_sweep, check_previous_assignment
from acmoe.lab.theory.optimum import check_kkt, check_optimiser
from acmoe.lab.theory.robustness import check_clean_scale, check_noisy_scale, check_without_noise
from acmoe.lab.theory.roots import check_distinct_roots, check_tied_roots
from acmoe.lab.theory.separation import check_separation, check_separation_needs_assumption
from acmoe.lab.theory.votes import check_confirmation_scope

CHECKS: tuple[Callable[[int], Check], ...] = (
    check_kkt,
    check_optimiser,
    check_distinct_roots,
    check_tied_roots,
    check_separation,
    check_separation_needs_assumption,
    check_misassignment,
    check_misassignment_scope,
    check_without_noise,
    check_noisy_scale,
    check_clean_scale,
    check_noise_sweep,
    check_previous_assignment,
    check_confirmation,
    check_confirmation_scope,
    check_aligned,
    check_rotated,
    check_separated,
    check_eigenvalue_lemma,
)


def run_checks(*, seed: int = 0) -> list[Check]:
    """Run all checks; equal seeds give equal numbers. It takes some ten seconds on one core."""
    check(0 <= seed < 2**63, f"seed={seed}; use an integer from 0 to 2**63 - 1")
    return [verify(seed) for verify in CHECKS]
