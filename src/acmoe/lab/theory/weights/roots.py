"""Check the equation for alpha: how many real roots it has, and which of them is the optimum.

D features, P distinct dispersions (poles of the equation), G grid points.
"""

import torch
from torch import Tensor

from acmoe.lab.theory.check import Check, conclude

ROOT_TOLERANCE = 1e-9  # relative to the largest dispersion plus lambda
FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0)  # lambda over the mean dispersion


def phi(
    alpha: Tensor, dispersion_D: Tensor, strength: float, *, pole: Tensor | None = None
) -> Tensor:
    """Return sum_q 1/(s_q + alpha) - d/lambda. If a pole is given, `alpha` is the offset from it.

    Near a pole -s_q, s_q + pole is exactly zero, so a tiny offset keeps its full precision. In the
    sum -s_q + offset it would be rounded away.
    """
    shifted = dispersion_D if pole is None else dispersion_D + pole[..., None]
    return (1 / (shifted + alpha[..., None])).sum(-1) - dispersion_D.numel() / strength


def real_roots(dispersion_D: Tensor, strength: float) -> Tensor:
    """Find every real root, ascending, by bisection of the sign changes on a grid.

    The grid is finest near the poles. The number of roots and their positions are not assumed.
    """
    poles_P = torch.tensor(sorted(set((-dispersion_D).tolist())), dtype=torch.float64)
    reach = 1e3 * (strength + dispersion_D.max())
    left_P = torch.cat([poles_P[:1] - reach, poles_P])
    width_P = torch.cat([poles_P, poles_P[-1:] + reach]) - left_P
    near_G = torch.logspace(-13, -0.302, 400, dtype=torch.float64)
    offset_PG = width_P[:, None] * torch.cat([near_G, (1 - near_G).flip(0)])

    positive_PG = phi(offset_PG, dispersion_D, strength, pole=left_P[:, None]) > 0
    rows, columns = (positive_PG[:, 1:] != positive_PG[:, :-1]).nonzero(as_tuple=True)
    low, high = offset_PG[rows, columns], offset_PG[rows, columns + 1]
    sign_of_low = positive_PG[rows, columns]
    for _ in range(100):
        middle = (low + high) / 2
        as_low = (phi(middle, dispersion_D, strength, pole=left_P[rows]) > 0) == sign_of_low
        low, high = torch.where(as_low, middle, low), torch.where(as_low, high, middle)
    return (left_P[rows] + (low + high) / 2).sort().values


def spectral_roots(dispersion_D: Tensor, strength: float) -> Tensor:
    """Find the same roots as eigenvalues: -alpha is an eigenvalue of diag(s) - (lambda/d) 1 1'.

    This follows from the determinant of a rank-one update. An eigenvalue equal to a dispersion is a
    pole instead of a root; a dispersion that occurs n times gives n - 1 of these.
    """
    matrix_DD = torch.diag(dispersion_D) - strength / dispersion_D.numel()
    candidates = -torch.linalg.eigvalsh(matrix_DD)
    gap = (candidates[:, None] + dispersion_D).abs().amin(-1)
    roots: Tensor = candidates[gap > 1e-12 * (dispersion_D.max() + strength)]
    return roots.sort().values


def _compare(dispersion_D: Tensor) -> tuple[list[int], float, int]:
    """Compare the two root finders over all lambdas.

    Returns the number of roots at each lambda, the largest relative error, and the number of
    lambdas at which only the largest root makes all weights positive.
    """
    counts, error, largest_only = [], 0.0, 0
    for factor in FACTORS:
        strength = factor * dispersion_D.mean().item()
        found, expected = real_roots(dispersion_D, strength), spectral_roots(dispersion_D, strength)
        counts.append(len(found))
        size = dispersion_D.max().item() + strength
        if len(found) != len(expected):
            error = max(error, 1.0)
        else:
            error = max(error, (found - expected).abs().max().item() / size)
        positive = (dispersion_D + found[:, None] > 0).all(-1).tolist()
        largest_only += positive == [False] * (len(found) - 1) + [True]
    return counts, error, largest_only


def _draw(generator: torch.Generator, dim: int, *, tied: bool) -> Tensor:
    if tied:
        return torch.randint(1, dim, (dim,), generator=generator).double()
    distinct_D = 0.1 + torch.rand(dim, generator=generator, dtype=torch.float64)
    distinct_D[-1] = distinct_D[0] * (1 + 1e-4)  # nearly a tie, which keeps its root
    return distinct_D


def check_distinct_roots(seed: int = 0, draws: int = 10, dim: int = 6) -> Check:
    generator = torch.Generator().manual_seed(seed)
    results = [_compare(_draw(generator, dim, tied=False)) for _ in range(draws)]
    counts = [count for result in results for count in result[0]]
    error = max(result[1] for result in results)
    largest_only = sum(result[2] for result in results)
    holds = set(counts) == {dim}
    confirmed = error <= ROOT_TOLERANCE and largest_only == len(counts) and holds
    return conclude(
        confirmed,
        name="Lemma on alpha, distinct dispersions",
        statement="sum_q 1/(s_q + alpha) = d/lambda has exactly d real solutions",
        setting=f"{len(counts)} equations, d = {dim}, all dispersions distinct",
        measured=f"{dim} roots in {counts.count(dim)} of {len(counts)}; only the largest gives "
        f"w > 0 in {largest_only}",
        figures={
            "equations": len(counts),
            "dim": dim,
            "fewest_roots": min(counts),
            "most_roots": max(counts),
            "equations_where_only_the_largest_is_positive": largest_only,
            "max_relative_error": error,
        },
        verdict="holds; the optimum is the largest root, which Theorem 1 does not say",
        doubt=f"roots by bisection and by eigenvalues differ by {error:.1e}, "
        f"or another root than the largest gives w > 0 ({largest_only} of {len(counts)})",
        basis="proof",
        holds_as_printed=True,
        note="Theorem 1 takes 'constants that satisfy' this equation. Of its roots only the "
        "largest makes every weight positive; any other makes the logarithm of a weight undefined.",
    )


def check_tied_roots(seed: int = 0, draws: int = 10, dim: int = 6) -> Check:
    generator = torch.Generator().manual_seed(seed)
    rows = [_draw(generator, dim, tied=True) for _ in range(draws)]
    # By hand: s = (1, 1), lambda = 1 gives 2/(1 + alpha) = 2, so alpha = 0 and nothing else.
    rows.append(torch.ones(2, dtype=torch.float64))
    results = [_compare(row) for row in rows]
    error = max(result[1] for result in results)
    as_distinct = all(
        set(r[0]) == {len(set(s.tolist()))} for r, s in zip(results, rows, strict=True)
    )
    short = sum(count < len(s) for r, s in zip(results, rows, strict=True) for count in r[0])
    equations = len(rows) * len(FACTORS)
    confirmed = error <= ROOT_TOLERANCE and as_distinct and results[-1][0] == [1] * len(FACTORS)
    return conclude(
        confirmed,
        name="Lemma on alpha, tied dispersions",
        statement="sum_q 1/(s_q + alpha) = d/lambda has exactly d real solutions",
        setting=f"{equations} equations with ties; s = (1, 1) by hand",
        measured=f"fewer than d roots in {short} of {equations}; (1, 1) has {results[-1][0][0]}",
        figures={
            "equations": equations,
            "equations_with_fewer_roots": short,
            "roots_equal_distinct_values": as_distinct,
            "roots_of_two_equal_dispersions": results[-1][0][0],
            "max_relative_error": error,
        },
        verdict="fails as printed: as many roots as distinct dispersions",
        doubt="the count is neither d nor the number of distinct dispersions",
        basis="counterexample",
        holds_as_printed=False,
        note="Between two equal dispersions there is no interval to hold a root. The root that "
        "matters, the largest, always exists.",
    )
